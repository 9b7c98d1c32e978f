"""What makes a new checkpoint from an old one."""
