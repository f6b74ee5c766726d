"""Shared kernels of losses on a linear layer's output: chunk sizes, matrix products, and ignored rows."""
