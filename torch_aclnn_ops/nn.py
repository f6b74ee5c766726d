"""Drop-in replacements for modules of :mod:`torch.nn`, with the same constructors, parameters and state dicts."""

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._checks import (
    AT_LEAST_1,
    NON_NEGATIVE,
    Divergence,
    Reduction,
    check_beta,
    check_choice,
    check_number,
    check_options,
    given_arguments,
    raise_for_missing_names,
)
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyLoss as _TorchLinearCrossEntropyLoss
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional.linear_cross_entropy.losses import OutputName
from torch_aclnn_ops.ops.linear_cross_entropy.call import check_numbers

import torch
from torch import Tensor


class MSELoss(torch.nn.MSELoss):
    """Mean squared error loss, a drop-in replacement for :class:`torch.nn.MSELoss`.

    Args:
        size_average: Deprecated, see ``reduction``.
        reduce: Deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Example:
        >>> loss = MSELoss()
        >>> loss(torch.zeros(2), torch.tensor([1.0, 3.0]))
        tensor(5.)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Call :func:`torch_aclnn_ops.functional.mse_loss`."""
        return F.mse_loss(input, target, reduction=cast("Reduction", self.reduction))  # a str in torch


class BCELoss(torch.nn.BCELoss):
    """Binary cross entropy loss, a drop-in replacement for :class:`torch.nn.BCELoss`.

    Args:
        weight: Rescaling factor of each element's loss, broadcastable to the input's shape.
        size_average: Deprecated, see ``reduction``.
        reduce: Deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Example:
        >>> loss = BCELoss(reduction="sum")
        >>> loss(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
        tensor(1.3863)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Call :func:`torch_aclnn_ops.functional.binary_cross_entropy`."""
        reduction = cast("Reduction", self.reduction)
        return F.binary_cross_entropy(input, target, weight=self.weight, reduction=reduction)


class Embedding(torch.nn.Embedding):
    """Embedding lookup table, a drop-in replacement for :class:`torch.nn.Embedding`.

    Args:
        num_embeddings: Number of rows of the table.
        embedding_dim: Size of each embedding vector.
        padding_idx: A row that is initialized to zeros and gets no gradient; negative values count from the end.
        max_norm: If given, looked-up rows with a larger norm are renormalized to it in place.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide each row's gradient by the number of occurrences of its index in the call.
        sparse: Return the gradient of the table as a sparse tensor.
        device: Device of the table.
        dtype: Dtype of the table.

    Example:
        >>> embedding = Embedding(4, 3, padding_idx=0)
        >>> embedding(torch.tensor([[0, 2]])).shape
        torch.Size([1, 2, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Call :func:`torch_aclnn_ops.functional.embedding`."""
        return F.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class LinearCrossEntropyLoss(_TorchLinearCrossEntropyLoss):
    """Linear layer with cross entropy loss, a drop-in replacement for :class:`torch.nn.LinearCrossEntropyLoss`.

    See :func:`torch_aclnn_ops.functional.linear_cross_entropy` for details on the arguments.

    Args:
        in_features: Size of each input row.
        num_classes: Number of classes.
        out_features: Dimensions of a K-dimensional loss.
        bias: Add a learnable bias to the logits.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        weight: Rescaling factor of each class, shape (num_classes,).
        ignore_index: Class index that is ignored, -100 by default; only with class indices.
        label_smoothing: Weight of the uniform distribution in the target, from 0 to 1.
        options: PyTorch's options, with torch 2.13 and later.
        softcap: Upper bound of the logits' magnitude.
        lse_square_scale: Scale of the z-loss.
        temperature: Divisor of the logits.
        shift: Number of positions by which labels are shifted, ``True`` for 1.
        zero_if_all_ignored: Return 0 for a mean over no rows, instead of NaN.
        chunk_size: Number of rows whose logits are materialized at a time.
        max_memory: Bytes that logits and float32 accumulators may take.

    Example:
        >>> loss = LinearCrossEntropyLoss(8, 100, softcap=30.0)
        >>> loss(torch.zeros(2, 8), torch.tensor([3, 99]))
        tensor(4.6052, grad_fn=<NllLossBackward0>)
        >>> loss.eval()(torch.zeros(2, 8)).shape  # without a target, the logits
        torch.Size([2, 100])
    """

    # Options that PyTorch's module lacks; as class attributes, so that older pickled instances have them too.
    softcap: float | None = None
    lse_square_scale: float = 0.0
    temperature: float = 1.0
    shift: bool | int = False
    zero_if_all_ignored: bool = False
    chunk_size: int | Literal["auto"] = "auto"
    max_memory: int | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: "LinearCrossEntropyOptions | None" = None,
        softcap: float | None = None,
        lse_square_scale: float = 0.0,
        temperature: float = 1.0,
        shift: bool | int = False,
        zero_if_all_ignored: bool = False,
        chunk_size: int | Literal["auto"] = "auto",
        max_memory: int | None = None,
    ) -> None:
        given = given_arguments(locals())
        name = "LinearCrossEntropyLoss"
        check_options(name, given)
        check_numbers(name, softcap=softcap, lse_square_scale=lse_square_scale)
        own = {option: given.pop(option) for option in LinearCrossEntropyLoss.__annotations__}
        super().__init__(**given)
        vars(self).update(own)

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        outputs: tuple[OutputName, ...] | Collection[OutputName] = (),
        process_group: Any = None,
    ) -> Any:
        """Call :func:`torch_aclnn_ops.functional.linear_cross_entropy`.

        ``process_group`` is for a ``linear`` sharded by :class:`torch.distributed.tensor.parallel.ColwiseParallel`. In
        eval mode and without a target, returns the logits after softcap and temperature, shape
        ``(*, C, d_1, ..., d_K)``.
        """
        if target is None:
            return self._logits(input, token_weight is not None or bool(outputs) or process_group is not None)
        classes = (self.num_classes, *self.out_features)
        bias = self.linear.bias
        return F.linear_cross_entropy(
            input,
            self.linear.weight.reshape(*classes, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(classes),
            weight=self.weight,
            reduction=cast("Reduction", self.reduction),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
            temperature=self.temperature,
            shift=self.shift,
            token_weight=token_weight,
            zero_if_all_ignored=self.zero_if_all_ignored,
            outputs=outputs,
            chunk_size=self.chunk_size,
            max_memory=self.max_memory,
            process_group=process_group,
        )

    def _logits(self, input: Tensor, needs_target: bool) -> Tensor:
        if self.training or needs_target:
            options = "with token_weight, outputs or process_group"
            reason = options if needs_target else "in training mode; call eval() to get logits"
            raise ValueError(f"LinearCrossEntropyLoss: target must not be None {reason}")
        logits: Tensor = self.linear(input)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.temperature != 1:
            logits = logits / self.temperature
        return logits.unflatten(-1, (-1, *self.out_features)) if self.out_features else logits

    def extra_repr(self) -> str:
        """Add the non-default options that PyTorch's module lacks."""
        values = {name: getattr(self, name) for name in LinearCrossEntropyLoss.__annotations__}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(type(self), name)]
        return ", ".join(filter(None, [super().extra_repr(), *changed]))


class LinearKLDivLoss(torch.nn.Module):
    """Divergence between a student's and a teacher's head. The heads are arguments of the call, not parameters.

    The options are those of :func:`torch_aclnn_ops.functional.linear_kl_div`.

    Example:
        >>> loss = LinearKLDivLoss(divergence="reverse_kl", temperature=2.0)
        >>> loss
        LinearKLDivLoss(divergence='reverse_kl', temperature=2.0)
        >>> loss(torch.zeros(2, 8), torch.zeros(100, 8), torch.zeros(2, 16), torch.zeros(100, 16))
        tensor(0.)
    """

    def __init__(
        self,
        divergence: Divergence = "forward_kl",
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        hard_weight: float = 0.0,
        ignore_index: int = -100,
        shift: bool | int = False,
        reduction: Reduction = "mean",
        zero_if_all_ignored: bool = False,
        chunk_size: int | Literal["auto"] = "auto",
        max_memory: int | None = None,
    ) -> None:
        given = given_arguments(locals())
        check_choice("LinearKLDivLoss", "divergence", divergence, get_args(Divergence))
        check_beta("LinearKLDivLoss", divergence, beta)
        if vocab_size is not None:
            check_number("LinearKLDivLoss", "vocab_size", vocab_size, AT_LEAST_1)
        check_number("LinearKLDivLoss", "hard_weight", hard_weight, NON_NEGATIVE)
        check_options("LinearKLDivLoss", given)
        super().__init__()
        self.options: dict[str, Any] = given

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        teacher_input: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        **tensors: Any,
    ) -> Tensor:
        """Call :func:`torch_aclnn_ops.functional.linear_kl_div`; ``tensors`` are its other arguments."""
        return F.linear_kl_div(input, linear_weight, teacher_input, teacher_weight, **self.options, **tensors)

    def extra_repr(self) -> str:
        """Return the options that are not the default."""
        parameters = inspect.signature(LinearKLDivLoss.__init__).parameters
        changed = {name: value for name, value in self.options.items() if value != parameters[name].default}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())


__all__ = sorted(name for name, value in globals().items() if getattr(value, "__module__", None) == __name__)


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:
    __getattr__ = raise_for_missing_names(__name__, torch.nn)
