"""The user's own rules, on the command line or in a file."""
