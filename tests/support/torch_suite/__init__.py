"""PyTorch's own tests of its DataLoader, run against penstock's loader."""
