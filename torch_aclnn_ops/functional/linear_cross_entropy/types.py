"""What type checkers know of ``linear_cross_entropy``: its options, and that requested outputs are not ``None``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, overload

from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops._types import Reduction
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput

from torch import Tensor
from torch.nn import Module

OutputName = Literal["log_probabilities", "entropy", "z_loss", "token_accuracy", "predicted_tokens", "logsumexp"]
Name = TypeVar("Name", bound=OutputName)


class Options(TypedDict, total=False):
    """The keyword arguments but ``outputs``, which decides about the type of the result."""

    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: Reduction
    ignore_index: int | None
    label_smoothing: float
    options: "LinearCrossEntropyOptions | None"
    softcap: float | None
    lse_square_scale: float
    temperature: float
    shift: bool | int
    token_weight: Tensor | None
    zero_if_all_ignored: bool
    chunk_size: int | Literal["auto"]
    max_memory: int | None
    process_group: Any
    vocab_sizes: Sequence[int] | None
    reduce_input_grad: bool
    fsdp_module: Module | None


if TYPE_CHECKING:
    _Requested = TypeVar("_Requested", bound=OutputName, contravariant=True)
    _Field = TypeVar("_Field", bound=OutputName)

    class _Output(Generic[_Field]):
        """A field that is a tensor in a result that has its name among the requested ones."""

        @overload
        def __get__(self, instance: "RequestedOutput[_Field]", owner: Any) -> Tensor: ...
        @overload
        def __get__(self, instance: "RequestedOutput[Any]", owner: Any) -> Tensor | None: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

    class RequestedOutput(LinearCrossEntropyOutput, Generic[_Requested]):
        """The result, with the names of the requested outputs in its type."""

        log_probabilities: _Output[Literal["log_probabilities"]]
        entropy: _Output[Literal["entropy"]]
        z_loss: _Output[Literal["z_loss"]]
        token_accuracy: _Output[Literal["token_accuracy"]]
        predicted_tokens: _Output[Literal["predicted_tokens"]]
        logsumexp: _Output[Literal["logsumexp"]]
