"""Call every operator of torch_npu with made-up arguments and print what happened as JSON.

``python every_operator.py PART PARTS`` calls every PARTS-th operator. After each call an operator of the CPU and one of
CANN have to compute the right thing.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

# torch_npu's own boxing of this one dereferences a null pointer, before it calls anything.
_CRASHES_IN_TORCH_NPU = {"atb::npu_multi_head_latent_attention.lse_out"}

_SHAPES = (((4, 8), torch.float32), ((2, 4, 8, 16), torch.float16), ((16, 32), torch.float16), ((32,), torch.float32))
_INDICES = ("ind", "idx", "seq", "expert_ids")
_VALUES: dict[str, object] = {
    "int": 2,
    "float": 1.0,
    "number": 1.0,
    "bool": False,
    "str": "sum",
    "List[int]": [2, 2],
    "List[float]": [1.0],
    "List[bool]": [True],
    "Device": torch.device("npu"),
}


def _value(argument: Any, shape: tuple[int, ...], dtype: torch.dtype) -> object:
    kind = str(argument.type)
    if kind == "Tensor" and any(part in argument.name for part in _INDICES):
        return torch.zeros(4, dtype=torch.int32, device="npu")
    if kind == "Tensor":
        return torch.rand(shape, device="npu", dtype=dtype)
    if kind == "List[Tensor]":
        return [torch.rand(8, 8, device="npu", dtype=torch.half)]
    return _VALUES.get(kind)


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        # What its queue has refused besides comes with the next synchronization.
        if call is not torch.npu.synchronize:
            _error_of(torch.npu.synchronize)
        return f"{type(error).__name__}: {error}"
    return ""


def _call(operator: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return what the call raised, or an empty text."""
    needed = [argument for argument in operator._schema.arguments if not argument.has_default_value()]
    positional = [_value(argument, shape, dtype) for argument in needed if not argument.kwarg_only]
    named = {argument.name: _value(argument, shape, dtype) for argument in needed if argument.kwarg_only}
    if isinstance(named.get("out"), list):
        named["out"] = [torch.rand(shape, device="npu", dtype=dtype) for _ in operator._schema.returns]
    return _error_of(lambda: operator(*positional, **named)) or _error_of(torch.npu.synchronize)


def _goes_on() -> str:
    """Return what is wrong with ordinary operators, or an empty text."""
    try:
        input = torch.ones(4, device="npu", requires_grad=True)
        torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu")).backward()
        assert input.grad is not None
        computed = [(input.detach() + 1).tolist(), input.grad.tolist()]
    except RuntimeError as error:
        return str(error)
    return "" if computed == [[2.0] * 4, [0.5] * 4] else f"computed {computed}"


def _operators() -> list[Any]:
    torch_npu.op_plugin.atb._atb_ops._register_atb_extensions()
    names = sorted({schema.name for schema in torch._C._jit_get_all_schemas()})
    packets = [
        getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1])
        for name in names
        if name.startswith(("npu::", "atb::"))
    ]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def main(part: int, parts: int) -> None:
    """Print a dictionary of what each call raised, with what was wrong afterwards."""
    found = {}
    for operator in _operators()[part::parts]:
        name = f"{operator._schema.name}.{operator._overloadname}"
        if name in _CRASHES_IN_TORCH_NPU:
            continue
        for number, (shape, dtype) in enumerate(_SHAPES):
            print(name, number, file=sys.stderr, flush=True)
            found[f"{name} {number}"] = [_call(operator, shape, dtype), _goes_on()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
