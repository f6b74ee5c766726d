"""The private names that lazy logits need, which are a wrapper subclass of tensors."""

from typing import Any

from torch_aclnn_ops._torch_compat import lookup

from torch.autograd import Function

_FEATURE = "patch_model()"

# With it a subclass reads its own attributes.
without_torch_function = lookup("_C.DisableTorchFunctionSubclass", _FEATURE)
make_wrapper = lookup("Tensor._make_wrapper_subclass", _FEATURE)

# Returns the function without compiling it and what it calls.
outside_of_dynamo = lookup("_compile._disable_dynamo", _FEATURE)


def node_class(function: type[Function]) -> Any:
    """Return the class of the nodes that a Function adds to the graph."""
    return function._backward_cls


def is_mutable(operator: Any) -> bool:
    """Return whether an operator writes to its arguments."""
    mutable: bool = operator._schema.is_mutable
    return mutable
