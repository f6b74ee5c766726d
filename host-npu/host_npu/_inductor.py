"""What Inductor says of NPU tensors: it generates code for the chip, by triton-ascend."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_REGISTRY = "torch._inductor.codegen.common"
_TRITON = "triton"
_REFUSAL = 'torch.compile(backend="inductor") generates no code for the host NPU: use backend="aot_eager" or "eager"'


def _refuse(*arguments: object, **options: object) -> NoReturn:
    raise RuntimeError(_REFUSAL)


class _Refusing(type):
    """The type of a backend that refuses the first question Inductor asks it, before anything is lowered."""

    supports_caching = property(_refuse)


class _Wrapper(metaclass=_Refusing):
    """The code around kernels, and their scheduling, whichever Inductor creates first."""

    __init__ = _refuse
    create = staticmethod(_refuse)


class _FolderWithoutCode(importlib.abc.Loader):
    """What is loaded of a folder on ``sys.path`` that has Triton's name: nothing."""

    def exec_module(self, module: ModuleType) -> NoReturn:
        """Raise the error of a package that is not installed."""
        raise ModuleNotFoundError("No module named 'triton': the folder of this name has no code", name=_TRITON)


class TritonFinder(importlib.abc.MetaPathFinder):
    """A meta path finder that hides folders named triton.

    torch takes one for the package and then cannot import ``torch._dynamo``, which the shapes of results need.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a folder named triton, and ``None`` for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == _TRITON else None
        return ModuleSpec(_TRITON, _FolderWithoutCode()) if spec is not None and spec.origin is None else None


class Importer(importlib.abc.MetaPathFinder):
    """A meta path finder that registers the refusal for NPUs with Inductor's backends."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the registry, and ``None`` for other modules."""
        if fullname != _REGISTRY:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register = module.register_backend_for_device
                register("npu", _Wrapper, _Wrapper)

                # Where triton is installed, torch_npu registers its own afterwards.
                def register_other(device: str, *arguments: object, **options: object) -> None:
                    if device != "npu":
                        register(device, *arguments, **options)

                module.register_backend_for_device = register_other  # type: ignore[attr-defined]

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
