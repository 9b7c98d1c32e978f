"""safetensors, one file."""
