"""Build torch_aclnn_ops; everything that can be declared is in pyproject.toml."""

from setuptools import setup

setup()
