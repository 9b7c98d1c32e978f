"""What is in a checkpoint, and one tensor under all its names."""
