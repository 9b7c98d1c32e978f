"""The same work shared by the ranks of torchrun."""
