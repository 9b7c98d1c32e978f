"""What a checkpoint is, if it is more than a state dict under a model's names: one row for each."""
