"""A diff and its question in, the commands that mend it out: each tried on the index, and asked about again."""
