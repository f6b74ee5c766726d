"""The version of the package, in a file that setuptools reads without importing torch."""

__version__ = "0.4.0"
