"""The files that the ranks of one run wrote with torch.save, as one checkpoint."""
