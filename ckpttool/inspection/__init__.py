"""Describe the contents of a checkpoint, and one tensor under all its names."""
