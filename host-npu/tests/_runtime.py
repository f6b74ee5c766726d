"""CANN's runtime, called as torch_npu calls it."""

import ctypes

import torch

MILLISECONDS = 40

runtime = ctypes.CDLL("libascendcl.so")
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
_sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)


def handle(stream: torch.npu.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.npu_stream)


def delay(stream: torch.npu.Stream) -> None:
    """Keep a stream busy for a while."""
    check(runtime.aclrtLaunchHostFunc(handle(stream), _sleep, ctypes.c_void_p(1000 * MILLISECONDS)))


def check(status: int) -> None:
    assert status == 0, (status, message())


def message() -> str | None:
    text = runtime.aclGetRecentErrMsg()
    return None if text is None else text.decode()
