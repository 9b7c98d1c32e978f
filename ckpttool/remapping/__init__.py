"""Make a new checkpoint: rename keys, move optimizer state, change the form."""
