"""What wrappers (DDP, FSDP, torch.compile, ...) put into names, and how it is recognised and taken out."""
