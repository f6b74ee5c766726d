"""Made-up arguments of torch_npu's operators, most of which torch_npu or CANN refuses."""

from typing import Any

import torch

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
# Arguments that need other values than those of their type; 5 is PyTorch's number of float16.
_NAMED: dict[str, object] = {"acl_format": 2, "dilation": [1, 1], "dtype": 5, "groups": 1}


def _value(argument: Any, shape: tuple[int, ...], dtype: Any) -> object:
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
    """Return made-up values for the required arguments of an operator of torch_npu, positional and named."""
    needed = [argument for argument in operator._schema.arguments if not argument.has_default_value()]
    positional = [_value(argument, shape, dtype) for argument in needed if not argument.kwarg_only]
    named = {argument.name: _value(argument, shape, dtype) for argument in needed if argument.kwarg_only}
    if isinstance(named.get("out"), list):
        named["out"] = [torch.rand(shape, device="npu").to(dtype) for _ in operator._schema.returns]
    return positional, named
