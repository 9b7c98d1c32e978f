"""A remap: the plan from the keys that are there to those that are wanted."""
