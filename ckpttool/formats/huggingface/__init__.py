"""Sharded checkpoints with an index, as Hugging Face writes them."""
