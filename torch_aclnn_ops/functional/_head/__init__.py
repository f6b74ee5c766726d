"""Shared code of losses on a linear layer's output: options, shifted labels, and a vocab-parallel head."""
