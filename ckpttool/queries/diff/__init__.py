"""What differs, why, and the command that mends it."""
