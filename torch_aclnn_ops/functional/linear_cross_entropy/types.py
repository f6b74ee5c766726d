"""What type checkers know of the results of ``linear_cross_entropy``: requested outputs are not ``None``."""

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput

from torch import Tensor

OutputName = Literal["log_probabilities", "entropy", "z_loss", "token_accuracy", "predicted_tokens", "logsumexp"]
Name = TypeVar("Name", bound=OutputName)


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
