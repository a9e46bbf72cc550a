"""How much one core can do as a well's thread."""
