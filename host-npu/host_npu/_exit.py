"""What has to happen before Python ends: the threads in which torch runs backward passes have to be idle.

When a backward pass is over, its thread still frees the graph. If a Python object hangs on it, and Python has begun to
end, the thread is stopped in a C++ destructor, which aborts the process: "terminate called without an active
exception". This is so on every accelerator; a busy machine makes it likely, and in CI it is a failed test.
"""

import atexit
import contextlib
import time

# An empty backward pass, too, has a graph to free: microseconds of work, whose end nothing announces.
_SECONDS_TO_FREE_A_GRAPH = 0.05


def wait_for_autograd_at_exit() -> None:
    """Let Python wait for torch's autograd threads before it ends; to be called after torch_npu is imported."""
    # Functions registered last run first: torch_npu's own, which releases the devices, comes after this one.
    atexit.register(_wait_for_autograd)


def _wait_for_autograd() -> None:
    """Run an empty backward pass in the thread of each device, which comes after what the thread still has to do."""
    import torch  # noqa: PLC0415
    import torch_npu  # type: ignore[import-untyped]  # noqa: PLC0415

    if not torch_npu.npu.is_initialized():
        return
    devices = range(torch_npu.npu.device_count())
    for index in devices:
        # torch's engine asks for the stream of each device that has a context, in a thread that may not raise. A
        # device that was only made current has none yet.
        if torch_npu._C._npu_hasPrimaryContext(index):
            with contextlib.suppress(RuntimeError), torch_npu.npu.device(index):
                torch_npu.npu.current_stream()
    for index in devices:
        # A device that has failed or has no memory left cannot run one, and the program's own error is the one to see.
        with contextlib.suppress(RuntimeError):
            if torch_npu.npu.max_memory_reserved(index) > 0:  # the program has used it
                ones = torch.empty(1, device=f"npu:{index}", requires_grad=True)
                # The gradient of a view needs no kernel.
                torch.autograd.grad(ones.view(1), ones, torch.empty_like(ones))
                time.sleep(_SECONDS_TO_FREE_A_GRAPH)
