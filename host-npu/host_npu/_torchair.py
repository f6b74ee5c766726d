"""torchair's compiled module: what its other modules ask for when they are imported, and the refusal to compile.

torchair builds graphs of CANN's graph engine, which is not simulated. Programs import it nevertheless, to register how
their operators would be converted, and for its configuration.
"""

import enum
import importlib.abc
import importlib.machinery
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

# torch_npu's wheel has the package under torch_npu.dynamo, and gives it the name torchair, too.
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
    """A graph for the graph engine, of which torchair derives its own."""

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
        """Return the spec of a compiled module of torchair, and ``None`` for others."""
        return ModuleSpec(fullname, self) if fullname in _COMPILED else None

    def exec_module(self, module: ModuleType) -> None:
        """Define what is asked for at import; every other function refuses its call."""
        vars(module).update(
            TorchDataType=TorchDataType,
            TorchNpuGraphBase=TorchNpuGraphBase,
            FinalizeGraphEngine=lambda: None,  # no engine was started
            __getattr__=_attribute,
        )
