"""Operands become values: CKPT a checkpoint, MODEL names, OUT a target."""
