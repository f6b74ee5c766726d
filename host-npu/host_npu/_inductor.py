"""Inductor, which would generate code for NPUs with triton-ascend: here, their graphs run operator by operator."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_COMPILER = "torch._inductor.compile_fx"
_TRITON = "triton"


def _has_npu(model: Any, example_inputs: Sequence[Any]) -> bool:
    """Return whether an argument or a result in the graph is on an NPU."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    results = [node.meta.get("example_value") for node in model.graph.nodes]
    found = tree_leaves([list(example_inputs), results])
    return any(isinstance(one, Tensor) and one.device.type == "npu" for one in found)


def _calling(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles graphs without NPU tensors with Inductor, and runs others without compilation."""

    @wraps(compile_fx)
    def compile_or_call(model_: Any, example_inputs_: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        if not _has_npu(model_, example_inputs_):
            return compile_fx(model_, example_inputs_, *arguments, **options)
        if "inner_compile" in options:
            raise RuntimeError(
                "the host NPU has no code to write to a file: use torch.compile, which calls the operators of the graph"
            )
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(model_, list(example_inputs_))

    return compile_or_call


class _FolderWithoutCode(importlib.abc.Loader):
    """The loader for a folder on ``sys.path`` that has Triton's name but no code."""

    def exec_module(self, module: ModuleType) -> NoReturn:
        """Raise the error for a package that is not installed."""
        raise ModuleNotFoundError("No module named 'triton': the folder of this name has no code", name=_TRITON)


class TritonFinder(importlib.abc.MetaPathFinder):
    """A meta path finder that hides folders named triton.

    torch mistakes one for the package and then cannot import ``torch._dynamo``, which computing result shapes requires.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a folder named triton; ``None`` for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == _TRITON else None
        return ModuleSpec(_TRITON, _FolderWithoutCode()) if spec is not None and spec.origin is None else None


class Importer(importlib.abc.MetaPathFinder):
    """A meta path finder that replaces the function with which Inductor compiles a graph."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the compiler's module; ``None`` for other modules."""
        if fullname != _COMPILER:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                module.compile_fx = _calling(module.compile_fx)  # type: ignore[attr-defined]

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec
