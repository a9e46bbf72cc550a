"""The disk tier: sealed frames in segments on local disks."""
