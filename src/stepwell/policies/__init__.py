"""What to keep where: pure policies, the same objects in the well and in the simulator."""
