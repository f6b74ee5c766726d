"""Every private or version-dependent name of torch that the package uses; no other module has one.

Torch 2.9 to 2.14 are served. A name without a remark is in all of them under the path below, and the package needs it:
without it, the import ends in a sentence that names both versions. The others say since when torch has them, and what
happens without them.
"""

import functools
import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The first and the last release that the package is tested with, as in pyproject.toml.
OLDEST, NEWEST = (2, 9), (2, 14)


def _unfit(reason: str) -> ImportError:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return ImportError(
        f"torch_aclnn_ops needs torch {oldest} to {newest}, but torch {torch.__version__} is installed{reason};"
        f' pip install "torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    )


if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise _unfit("")

try:
    from torch._C import DispatchKeySet, _is_fwd_grad_enabled
    from torch._C import _after_autograd_keyset as after_autograd_keyset
    from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
    from torch._C import _disabled_torch_function_impl as disabled_torch_function_impl
    from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
    from torch._C import _is_tracing as in_jit_trace
    from torch._C import _len_torch_dispatch_stack as _number_of_dispatch_modes
    from torch._C._functorch import (
        TransformType,
        get_interpreter_stack,
        get_unwrapped,
        is_batchedtensor,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        peek_interpreter_stack,
    )
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd import forward_ad
    from torch.backends.cpu import get_cpu_capability as cpu_capability
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.library import register_vmap
    from torch.nn import Buffer
    from torch.nn._reduction import get_enum, legacy_get_string
    from torch.nn.modules.loss import _WeightedLoss
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves, tree_map

    _ = forward_ad._current_level
    embedding_bag = torch.ops.aten._embedding_bag.default
    native_mse_loss: Callable[..., Tensor] = torch._C._nn.mse_loss  # takes the number of a reduction
    native_binary_cross_entropy: Callable[..., Tensor] = torch._C._nn.binary_cross_entropy
    foreach_add_, foreach_copy_, foreach_lerp_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_lerp_
    fused_adam_, fused_adamw_ = torch._fused_adam_, torch._fused_adamw_
    if torch.distributed.is_available():
        import torch.distributed._functional_collectives  # registers the operators of c10d_functional
except (AttributeError, ImportError) as error:
    raise _unfit(f", which lacks what the package uses ({error})") from error

# The operators of a torch that is built with distributed.
c10d_functional = torch.ops._c10d_functional


class _LinearCrossEntropyLoss(_WeightedLoss):
    """The constructor, parameters and description of torch's module."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
    ) -> None:
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(
                f"LinearCrossEntropyLoss: weight must have shape {[num_classes]}, but its shape is {list(weight.shape)}"
            )
        if not 0 <= label_smoothing <= 1:
            raise RuntimeError(
                f"LinearCrossEntropyLoss: label_smoothing must be from 0 to 1, but it is {label_smoothing}"
            )
        super().__init__(weight, reduction=reduction)
        self.num_classes = num_classes
        self.out_features = out_features
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        outputs = num_classes * math.prod(out_features)
        self.linear = torch.nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        names = ("reduction", "ignore_index", "label_smoothing", "options")
        values = {
            "in_features": self.linear.in_features,
            "num_classes": self.num_classes,
            "out_features": self.out_features,
            "bias": self.linear.bias is not None,
            **{name: getattr(self, name) for name in names},
        }
        return ", ".join(f"{name}={value}" for name, value in values.items())


if TYPE_CHECKING:
    from torch.nn import LinearCrossEntropyLoss, LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy
else:
    # Since 2.13. Without them options= is refused, the module has a base of ours, and the function is composed.
    LinearCrossEntropyOptions = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    linear_cross_entropy = getattr(torch.nn.functional, "linear_cross_entropy", None)
    LinearCrossEntropyLoss = getattr(torch.nn, "LinearCrossEntropyLoss", None) or _LinearCrossEntropyLoss

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written to."""


def has_bfloat16_units() -> bool:
    """Return whether the CPU has units for bfloat16 products, and torch uses them."""
    if cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):  # asked for by ATEN_CPU_CAPABILITY, maybe
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def in_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` sees the calls of operators."""
    return _number_of_dispatch_modes() > 0


def in_forward_ad() -> bool:
    """Return whether operators have to push tangents forward."""
    return forward_ad._current_level >= 0 and _is_fwd_grad_enabled()


def assume_constant_result(function: _Function) -> _Function:
    """Let Dynamo call a function while it traces, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does no more than this, after an import of a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load_tables_of_functions() -> None:
    """Let torch make its tables of functions, which it does once, before somebody replaces one of them.

    Dynamo would take a replacement for torch's own, and not trace it.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()
    torch.overrides.get_testing_overrides()


@assume_constant_result  # Dynamo of 2.9 cannot trace it
def is_autocast_available(device_type: str) -> bool:
    """Return whether tensors of a type of device can be autocast."""
    return torch.amp.is_autocast_available(device_type)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies a Function whose forward has ctx, outside of transforms: half of ``apply`` is about them."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def schema_of(overload: Any) -> Any:
    """Return the schema of an operator's overload."""
    return overload._schema


def load_state_dict_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks that an optimizer calls before and after it loads a state dict."""
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def per_optimizer_state(grad_scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a ``GradScaler`` knows of an optimizer's step."""
    state: dict[str, Any] = grad_scaler._per_optimizer_states[id(optimizer)]
    return state


@assume_constant_result
def device_types_of_group(group_name: str) -> tuple[str, ...]:
    """Return the types of device whose tensors a process group takes."""
    group = torch._C._distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return tuple(device.type for device in group._device_types)


def is_in_fsdp_forward(fsdp_module: Any) -> bool:
    """Return whether FSDP2 takes what runs now for a part of a module's forward pass."""
    name: str = fsdp_module._get_fsdp_state()._training_state.name
    return name == "FORWARD"


def modules_sharded_with(module: Any) -> int:
    """Return how many modules the call of ``fully_shard`` was for that has sharded this one; 0 if there was none."""
    if not hasattr(module, "_get_fsdp_state"):
        return 0
    return len(module._get_fsdp_state()._modules)


def synchronize(device: torch.device) -> None:
    """Wait for what a device was asked to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def dtensor_of_local(tensor: torch.Tensor) -> Any:
    """Return mesh and placements of the DTensor that a tensor is the ``to_local()`` of, or ``None``; autograd knows."""
    return getattr(tensor.grad_fn, "dtensor_spec", None)
