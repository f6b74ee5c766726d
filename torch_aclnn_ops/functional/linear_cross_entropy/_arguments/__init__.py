"""Argument checks of the linear cross entropy: PyTorch's arguments first, then further options."""
