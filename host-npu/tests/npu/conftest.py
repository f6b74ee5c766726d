"""The tests in this folder need an NPU: ``python -m host_npu -m pytest tests/npu``."""

import torch

if not hasattr(torch, "npu"):
    collect_ignore_glob = ["test_*.py"]
