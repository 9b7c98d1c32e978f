"""New weights in an exported program."""
