"""Assemble rank files, and split a checkpoint into them."""
