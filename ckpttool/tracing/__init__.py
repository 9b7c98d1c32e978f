"""A model's own code becomes `Names`: its saving and loading are run without data, and recorded.
Needs torch.
"""
