"""`Names` and keys become matches and plans. No torch, and no format."""
