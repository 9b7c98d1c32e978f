"""One output written by the ranks of a torchrun: what they say to each other, and who writes which bytes."""
