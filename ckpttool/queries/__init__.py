"""What only reads: each question becomes a value that the reports show."""
