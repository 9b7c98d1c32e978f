"""Infer which tensors of two checkpoints are the same."""
