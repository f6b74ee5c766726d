"""What makes operators and functions that can be differentiated of formulas; ``csrc/autograd`` is the same in C++.

``raw_operator`` makes a PyTorch operator of a formula and of CANN's kernel, and ``raw_function`` its autograd Function;
``eager_or_compiled`` applies a Function in every mode of PyTorch, and ``derivatives`` says which mode that is.
"""
