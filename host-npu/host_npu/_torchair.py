"""torchair's compiled modules: the names that its other modules import, and functions that refuse to compile.

torchair builds graphs for CANN's graph engine, which is not simulated. Programs still import it to register converters
for their operators, and for its configuration.
"""

import enum
import importlib.abc
import importlib.machinery
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

# torch_npu's wheel contains the package as torch_npu.dynamo, and also names it torchair.
_COMPILED = ("torchair.core._torchair", "torchair.core._npu_graph_executor", "torchair.core._npu_utils")
_REFUSAL = 'torch.compile(backend="npu") generates no code for the host NPU: use backend="aot_eager" or "eager"'


class TorchDataType(enum.IntEnum):
    """The dtypes of tensors, as ``torch.ScalarType`` numbers them."""

    UINT8, INT8, INT16, INT32, INT64, FLOAT16, FLOAT32, FLOAT64 = range(8)
    COMPLEX64, COMPLEX128, BOOL, BF16 = 9, 10, 11, 15
    UINT16, UINT32, UINT64 = 27, 28, 29


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise RuntimeError(f"{_REFUSAL}; torchair's {name} is not simulated")

    return refuse


class TorchNpuGraphBase:
    """A graph for the graph engine, the base class of torchair's own graphs."""

    __init__ = _refuse("TorchNpuGraphBase")


def _attribute(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _refuse(name)


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A meta path finder for torchair's compiled modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a compiled module of torchair; ``None`` for others."""
        return ModuleSpec(fullname, self) if fullname in _COMPILED else None

    def exec_module(self, module: ModuleType) -> None:
        """Define the names that are needed at import; all other functions refuse the call."""
        vars(module).update(
            TorchDataType=TorchDataType,
            TorchNpuGraphBase=TorchNpuGraphBase,
            FinalizeGraphEngine=lambda: None,  # no engine was started
            __getattr__=_attribute,
        )
