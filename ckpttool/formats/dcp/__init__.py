"""Folders of torch.distributed.checkpoint."""
