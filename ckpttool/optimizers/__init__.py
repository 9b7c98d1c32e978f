"""Whose state an optimizer id is, and how state moves to other names, orders and groups."""
