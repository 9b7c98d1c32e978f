"""A `Document` becomes text, a module for each format."""
