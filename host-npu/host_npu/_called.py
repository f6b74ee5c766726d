"""Which operators of CANN functions of torch_npu call on the simulated chip.

It calls the functions with made-up arguments, most of which torch_npu or CANN refuses later, in a process of its own:
``python -m host_npu._called npu_rms_norm`` prints the function, a line for each operator, and ``runs`` if a call has
succeeded.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

_SECONDS = 600  # a busy machine takes a minute to import torch and torch_npu
# Shapes whose second size is the number of heads, and one for functions of matrices.
_SHAPES = (2, 2, 8, 16), (16, 32), (2, 8, 32), (32,)
_INDICES = ("ind", "idx", "seq", "expert_ids")
_VALUES: dict[str, object] = {
    "int": 2,
    "float": 1.0,
    "number": 1.0,
    "bool": False,
    "Device": "npu",
    "List[int]": [2, 2],
    "List[float]": [1.0],
    "List[bool]": [True],
}
# Arguments for which other values than those of their type are needed; 5 is the number of float16 in PyTorch.
_NAMED: dict[str, object] = {"acl_format": 2, "dilation": [1, 1], "dtype": 5, "groups": 1}
# Conversions of the arguments, which functions call besides.
_CONVERSIONS = ("aclnnInplaceCopy", "aclnnCast")


class Called(NamedTuple):
    """The names of the operators that calls have shown, and whether a call has succeeded.

    The function's own name stands for a graph operator without one.
    """

    operators: Sequence[str] = ()
    runs: bool = False


def operators_of(functions: Sequence[str]) -> dict[str, Called]:
    """Return what each function of torch_npu calls. The host NPU must be enabled, for child processes."""
    import torch

    left = [function for function in functions if hasattr(torch.ops.npu, function)]
    called: dict[str, Called] = {}
    while left:
        said = _said_of(left) or {left[0]: Called()}
        called |= said
        # If a call has ended the process, the next one begins after it.
        left = left[left.index(list(said)[-1]) + 1 :]
    return called


def _said_of(functions: Sequence[str]) -> dict[str, Called]:
    """Return what one process says of the functions, up to one that ends it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-m", __name__, *functions]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, cwd=folder)
        parts = re.split(r"^of (\w+)\n", result.stdout, flags=re.MULTILINE)[1:]
        return {
            function: Called(re.findall(r"^calls (\w+)$", said, re.MULTILINE), "\nruns\n" in f"\n{said}")
            for function, said in zip(parts[::2], parts[1::2], strict=True)
        }
    return {}


def _value(argument: Any, shape: tuple[int, ...], dtype: Any) -> object:
    import torch

    kind = str(argument.type)
    if argument.name in _NAMED:
        return _NAMED[argument.name]
    if kind == "Tensor" and any(part in argument.name for part in _INDICES):
        return torch.zeros(4, dtype=torch.int32, device="npu")
    if kind == "Tensor":
        return torch.rand(shape, device="npu").to(dtype)
    if kind == "List[Tensor]":
        return [torch.rand(8, 8, device="npu").to(dtype)]
    if kind == "str":
        return "BNSD" if "layout" in argument.name else "sum"
    return _VALUES.get(kind)


def arguments_of(operator: Any, shape: tuple[int, ...], dtype: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return made-up required arguments of an operator of torch_npu, positional and named."""
    import torch

    needed = [argument for argument in operator._schema.arguments if not argument.has_default_value()]
    positional = [_value(argument, shape, dtype) for argument in needed if not argument.kwarg_only]
    named = {argument.name: _value(argument, shape, dtype) for argument in needed if argument.kwarg_only}
    if isinstance(named.get("out"), list):
        named["out"] = [torch.rand(shape, device="npu").to(dtype) for _ in operator._schema.returns]
    return positional, named


def _calls(operator: Any, shape: tuple[int, ...], dtype: Any) -> tuple[list[str], bool]:
    """Return the operators that one call has asked for, until something was refused, and whether it has succeeded."""
    import torch

    import host_npu

    positional, named = arguments_of(operator, shape, dtype)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    npu.synchronize()
    host_npu.reset()
    host_npu.count_calls()
    refused: list[str] = []
    runs = True
    for call in (lambda: operator(*positional, **named), npu.synchronize):
        try:
            call()
        except Exception as error:
            runs = False
            refused += re.findall(
                r"does not simulate (?:the graph operator \(aclop\) of )?([A-Z]\w+|aclnn\w+)", str(error)
            )
            if re.search(r"does not simulate the graph operator \(aclop\) of (?:npu_|this call)", str(error)):
                refused.append(operator._schema.name.partition("::")[2])
    phases = [re.fullmatch(r"(aclnn\w+)GetWorkspaceSize", name) for name in host_npu.stats().calls]
    return [found[1] for found in phases if found] + refused, runs


def _print_called(function: str) -> None:
    """Print what the function's overloads call."""
    import torch

    print(f"of {function}", flush=True)
    packet = getattr(torch.ops.npu, function, None)
    names: dict[str, None] = {}
    any_runs = False
    for overload in [] if packet is None else packet.overloads():
        for shape in _SHAPES:
            for dtype in (torch.float16, torch.float32):
                called, runs = _calls(getattr(packet, overload), shape, dtype)
                names |= dict.fromkeys(called)
                any_runs |= runs
    others = [name for name in names if name not in _CONVERSIONS]
    for name in others or (names if any_runs else ()):
        print(f"calls {name}")
    if any_runs:
        print("runs")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        _print_called(name)
