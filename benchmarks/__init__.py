"""Benchmarks, one file an operator: ``python -m benchmarks.mse_loss``."""
