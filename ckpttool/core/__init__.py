"""Values that everything shares: checkpoints, names, plans, expressions, errors, options."""
