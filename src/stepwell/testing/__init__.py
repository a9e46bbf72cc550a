"""Contract kits and test doubles, shipped so that others can test their own parts."""
