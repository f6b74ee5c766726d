"""Benchmarks, one file an operator: ``python -m benchmarks.embedding``."""
