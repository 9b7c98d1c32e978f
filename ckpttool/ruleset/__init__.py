"""The user's rules: patterns, TOML files and presets."""
