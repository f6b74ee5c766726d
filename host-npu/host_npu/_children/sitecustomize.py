"""Enable the host NPU in child processes; ``host_npu.enable`` puts this folder in PYTHONPATH."""

import importlib.machinery
import importlib.util
import itertools
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    """Run the environment's own ``sitecustomize``, which this one hides."""
    others = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_hidden()
# ``python -m host_npu`` enables the host NPU itself, by its arguments.
if os.environ.get("HOST_NPU_ENABLE", "0") not in ("", "0") and ("-m", "host_npu") not in itertools.pairwise(
    sys.orig_argv
):
    # An interpreter without host_npu or torch_npu has nothing to enable.
    if importlib.util.find_spec("host_npu") is not None and importlib.util.find_spec("torch_npu") is not None:
        import host_npu

        host_npu._enable_as_told()
