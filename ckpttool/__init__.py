"""ckpttool inspects, diffs and converts PyTorch checkpoints, and says exactly how the names of their tensors differ."""

__version__ = "0.1.0"
