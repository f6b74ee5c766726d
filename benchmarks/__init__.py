"""Benchmarks, one file per operator: ``python -m benchmarks.embedding``."""
