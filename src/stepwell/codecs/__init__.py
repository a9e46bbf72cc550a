"""How bytes change form on their way: into buffers of the caller, without a copy of their own."""
