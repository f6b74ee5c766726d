"""Wait for torch's autograd threads before Python exits.

After a backward pass, its thread still frees the graph. If the graph owns a Python object and Python is already
shutting down, the thread is stopped in a C++ destructor, which aborts the process: "terminate called without an active
exception". This can happen on every accelerator; on a busy machine it is likely, and in CI it is a failed test.
"""

import atexit
import contextlib
import time

# Even an empty backward pass has a graph to free: microseconds of work, whose end cannot be observed.
_SECONDS_TO_FREE_A_GRAPH = 0.05


def wait_for_autograd_at_exit() -> None:
    """Register a wait for torch's autograd threads at exit; call it after the import of torch_npu."""
    # Exit functions run in reverse order: this one runs before torch_npu's, which releases the devices.
    atexit.register(_wait_for_autograd)


def _wait_for_autograd() -> None:
    """Run an empty backward pass on each device's thread, after the thread's remaining work."""
    import torch  # noqa: PLC0415
    import torch_npu  # type: ignore[import-untyped]  # noqa: PLC0415

    if not torch_npu.npu.is_initialized():
        return
    devices = range(torch_npu.npu.device_count())
    for index in devices:
        # torch's engine queries the stream of each device that has a context, on a thread that must not raise. A device
        # that was only made current has no stream yet.
        if torch_npu._C._npu_hasPrimaryContext(index):
            with contextlib.suppress(RuntimeError), torch_npu.npu.device(index):
                torch_npu.npu.current_stream()
    for index in devices:
        # A device that failed or is out of memory cannot run one; the program's own error is the relevant one.
        with contextlib.suppress(RuntimeError):
            if torch_npu.npu.max_memory_reserved(index) > 0:  # used by the program
                ones = torch.empty(1, device=f"npu:{index}", requires_grad=True)
                # The gradient of a view needs no kernel.
                torch.autograd.grad(ones.view(1), ones, torch.empty_like(ones))
                time.sleep(_SECONDS_TO_FREE_A_GRAPH)
