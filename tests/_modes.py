"""Modes that record the operators and functions of torch that are called, and the sizes of their results."""

from typing import Any

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Calls(TorchDispatchMode):
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class FunctionCalls(TorchFunctionMode):
    """Records the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result, except masks."""

    elements = 0
    masks: tuple[torch.dtype, ...] = (torch.bool,)  # torch_npu's attention makes a causal mask of 2048 x 2048

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        # Tensors on "meta" have no memory.
        sizes = [one.numel() for one in made if not one.is_meta and one.dtype not in self.masks]
        self.elements = max([self.elements, *sizes])
        return result


class LargestOfAll(Largest):
    """The same, including masks."""

    masks = ()
