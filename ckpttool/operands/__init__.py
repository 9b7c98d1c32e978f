"""What the user names becomes a value: CKPT a checkpoint, MODEL names, OUT a place to write."""
