"""What torch.save writes, and TorchScript archives."""
