"""What engine and well say to each other. Both sides import this and nothing else of each other."""
