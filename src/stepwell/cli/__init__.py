"""The `stepwell` command: a thin layer of arguments and printing over the programs."""
