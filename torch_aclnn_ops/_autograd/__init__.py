"""Autograd support for operators and functions; ``csrc/autograd`` is its C++ counterpart.

``raw_operator`` builds a PyTorch operator from a formula and CANN's kernel; ``eager_or_compiled`` applies a Function in
every PyTorch mode; ``derivatives`` has those of a formula, and detects the current mode.
"""
