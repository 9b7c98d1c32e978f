"""Compare checkpoints, models, names and optimizers; nothing is written."""
