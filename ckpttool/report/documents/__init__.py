"""A result becomes a `Document`, a module for each kind of result."""
