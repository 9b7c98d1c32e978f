"""Find the command that fixes a diff, and try it on the index."""
