"""Flat parameters and parts of tensors put together, and cut again."""
