"""What PyTorch is doing, and what its tensors and modules are."""
