"""Every function and method of torch that accepts some of these arguments, called with logits of shape (1, 3, 50)."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch_aclnn_ops._tensors import map_nested
from torch_aclnn_ops.integrations import _lazy_heads
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits, materialized
from torch_aclnn_ops.integrations._materializations import Materializations

import torch
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_overridable_functions
from torch.utils._pytree import tree_leaves

SHAPE = (1, 3, 50)
FEATURES = 8
# Functions whose results do not depend on an argument, change with each call, or belong to the process; by reason:
_NOT_COMPARED = {
    "an address": "data_ptr _cdata const_data_ptr",
    "a node of another class": "_grad_fn",
    "names of the class": "__dir__",
    "asks for a tensor": "__contains__",
    "asks for a tensor, where the equation is a list; compared in test_lazy_logits.py": "einsum",
    "private": "_clear_non_serializable_cached_data _backward_hooks _post_accumulate_grad_hooks _grad _version",
    "refused, in test_lazy_logits.py": "register_hook retain_grad",
    "of Python 2": "__div__ __rdiv__ __idiv__",
    "compared by pickling, in test_lazy_logits.py": "__reduce_ex__",
    "says that nothing was computed": "__repr__ __format__",
    "of the object": "__hash__",
    "not called by users": "__torch_dispatch__ __torch_function__",
    "an object of its own": "storage untyped_storage _typed_storage grad_fn",
    "not written to": "empty_like new_empty new_empty_strided resize_ resize_as_ resize resize_as new_tensor",
    "has memory that was not written to": "fbgemm_pack_gemm_matrix_fp16",
    "whether a linear layer's outputs are a view is of the layer's making": "_base _is_view",
}
NOT_COMPARED = {name for names in _NOT_COMPARED.values() for name in names.split()}


def head() -> tuple[nn.Linear, Tensor]:
    """Return a head and its input, always the same."""
    torch.manual_seed(0)
    return nn.Linear(FEATURES, SHAPE[-1]), torch.randn(*SHAPE[:-1], FEATURES, requires_grad=True)


def real_logits() -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the tensors that they are differentiated by."""
    linear, input = head()
    return linear(input), [input, *linear.parameters()]


def lazy_logits() -> tuple[LazyLogits, list[Tensor]]:
    """Return the same as lazy logits."""
    linear, input = head()
    _lazy_heads.patch(linear, {}, Materializations())
    return linear(input), [input, *linear.parameters()]


def arguments(x: Tensor) -> dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the arguments that functions are called with."""
    other = torch.linspace(-1, 1, 150).reshape(SHAPE)
    index = torch.tensor([[[1], [0], [4]]])
    return {
        "logits": lambda: ((x,), {}),
        "logits, 2": lambda: ((x, 2), {}),
        "logits, 0.5": lambda: ((x, 0.5), {}),
        "logits, a tensor": lambda: ((x, other), {}),
        "a tensor, logits": lambda: ((other, x), {}),
        "logits, logits": lambda: ((x, x), {}),
        "a list of logits": lambda: (([x, x],), {}),
        "logits, 1, 2": lambda: ((x, 1, 2), {}),
        "logits, 0, 1": lambda: ((x, 0.0, 1.0), {}),
        "logits, 1, an index": lambda: ((x, 1, torch.tensor([2, 0])), {}),
        "logits, -1, indices": lambda: ((x, -1, index), {}),
        "logits, indices, -1": lambda: ((x, index, -1), {}),
        "logits, a mask": lambda: ((x, other > 0), {}),
        "logits, a mask, 0.5": lambda: ((x, other > 0, 0.5), {}),
        "a mask, logits, 0.5": lambda: ((other > 0, x, 0.5), {}),
        "logits, a shape": lambda: ((x, (3, 50)), {}),
        "logits, dims": lambda: ((x, (2, 1, 0)), {}),
        "logits, a name": lambda: ((x, "sum"), {}),
        "logits, a dtype": lambda: ((x, torch.float64), {}),
        "logits, a matrix": lambda: ((x, other[0, :, :].T.contiguous()), {}),
        "logits, a tensor, a tensor": lambda: ((x, other, other + 2), {}),
        "logits, weight": lambda: ((x, torch.ones(4, 50)), {}),
        "logits, 50": lambda: ((x, (50,)), {}),
        "logits, 1": lambda: ((x, 1), {}),
        "logits, dim": lambda: ((x,), {"dim": -1}),
        "logits, 5, dim": lambda: ((x, 5), {"dim": -1}),
        "rows": lambda: ((x[0],), {}),
        "rows, rows": lambda: ((x[0], x[0]), {}),
        "rows, targets": lambda: ((x[0], torch.tensor([4, -100, 1])), {}),
        "rows, a tensor": lambda: ((x[0], other[0]), {}),
        "rows, a tensor, 1": lambda: ((x[0], other[0], torch.ones(3)), {}),
        "a vector": lambda: ((x[0, 0],), {}),
        "a vector, a vector": lambda: ((x[0, 0], x[0, 1]), {}),
        # Its condition number is 2; that of the first classes is 288, which amplifies rounding errors.
        "a square matrix": lambda: ((x[0, :, 19:22],), {}),
        "a square matrix, a matrix": lambda: ((x[0, :, 19:22], x[0, :, 22:]), {}),
        "logits of images": lambda: ((x.reshape(1, 1, 3, 50), 2), {}),
        "logits of images, weight": lambda: ((x.reshape(1, 1, 3, 50), torch.ones(2, 1, 2, 2)), {}),
    }


ARGUMENTS = list(arguments(torch.empty(SHAPE)))


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield functions that ``__torch_function__`` can override, and names; methods and attributes are found by name."""
    ignored = get_ignored_functions()
    for owner, found in get_overridable_functions().items():
        for function in found:
            name = getattr(function, "__name__", "")
            attribute = getattr(getattr(function, "__self__", None), "__name__", "")
            if function not in ignored and name not in NOT_COMPARED and attribute not in NOT_COMPARED:
                place = getattr(owner, "__name__", type(owner).__name__)  # without an address, which differs
                yield f"{place}.{attribute}{name}", _looked_up(function, attribute) or function


def _looked_up(function: Callable[..., Any], attribute: str) -> Callable[..., Any] | None:
    """Return a function that finds a method or attribute of a tensor as programs do; None for other functions."""
    if attribute and function.__name__ == "__get__":
        return lambda logits: getattr(logits, attribute)
    name = getattr(function, "__name__", "")
    if getattr(Tensor, name, None) is not function:
        return None
    return lambda logits, *args, **kwargs: getattr(logits, name)(*args, **kwargs)


def outcome(function: Callable[..., Any], name: str, logits: Callable[[], tuple[Tensor, list[Tensor]]]) -> Any:
    """Call a function, and return its result, what it has written, and the gradients; or the class of its error."""
    made, sources = logits()
    torch.manual_seed(1)
    try:
        args, kwargs = arguments(made)[name]()
        result = function(*args, **kwargs)
        if inspect.isgenerator(result):
            result = list(result)
        result, made = map_nested(materialized, (result, made))
        found = [one for one in tree_leaves((result, made)) if isinstance(one, Tensor)]
        total = sum(one.double().sum() for one in found if one.requires_grad and not one.is_sparse)
        gradients = torch.autograd.grad(total, sources, allow_unused=True) if isinstance(total, Tensor) else ()
    except Exception as error:
        return type(error)
    return result, made, gradients


def differs(found: Any, expected: Any) -> str:
    """Return the difference between two outcomes; empty if they are the same."""
    if isinstance(expected, type) or isinstance(found, type):
        return "" if found is expected else f"{found} for {expected}"
    found, expected = [materialized(one) for one in tree_leaves(found)], tree_leaves(expected)
    if len(found) != len(expected):
        return f"{len(found)} results for {len(expected)}"
    return "; ".join(filter(None, map(_differs, found, expected)))


def _differs(found: Any, expected: Any) -> str:
    if not isinstance(expected, Tensor):
        is_number = isinstance(expected, (bool, float, int, str, torch.dtype, torch.device, torch.layout, type(None)))
        same = type(found) is type(expected) and (found == expected or found != found or not is_number)
        return "" if same else f"{found!r} for {expected!r}"
    if not isinstance(found, Tensor):
        return f"{type(found)} for a tensor"
    for name in ("shape", "dtype", "requires_grad", "is_leaf", "layout"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name} {getattr(found, name)} for {getattr(expected, name)}"
    if expected.layout == torch.strided and found.stride() != expected.stride():
        return f"strides {found.stride()} for {expected.stride()}"
    try:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""
