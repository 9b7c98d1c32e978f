"""A module for each kind of result, which becomes a `Document`."""
