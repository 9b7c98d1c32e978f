"""Kinds of sections that are more than a state dict under a model's names: one row for each."""
