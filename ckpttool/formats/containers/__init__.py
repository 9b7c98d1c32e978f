"""What several formats are made of: zip archives, pickles, JSON."""
