"""Autograd support for operators and functions; ``csrc/autograd`` is its C++ counterpart.

``raw_operator`` builds a PyTorch operator from a formula and CANN's kernel, and ``raw_function`` builds its autograd
Function; ``eager_or_compiled`` applies a Function in every PyTorch mode, and ``derivatives`` detects the current mode.
"""
