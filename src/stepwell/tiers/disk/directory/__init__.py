"""One directory of the disk tier: its segments, what is written and deleted in them, and how room is made."""
