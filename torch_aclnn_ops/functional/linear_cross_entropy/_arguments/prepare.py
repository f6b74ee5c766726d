"""A call whose arguments are supported, in the form that implementations take."""

import math

from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops._torch_compat import is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import check_no_tangent, lower_precision_autocast_dtype
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.options import (
    check_outputs_of_probabilities,
    check_token_weight,
)
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import TorchArguments, widen_to
from torch_aclnn_ops.functional.linear_cross_entropy._distributed import check_not_local
from torch_aclnn_ops.functional.linear_cross_entropy.implementations import LossCall
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LossOptions
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import VocabularyShards
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.tiling import LogitOptions

import torch
from torch import Tensor


def prepare(
    given: TorchArguments,
    token_weight: Tensor | None,
    logit_options: LogitOptions,
    loss_options: LossOptions,
    shards: VocabularyShards | None,
    reduce_input_grad: bool,
) -> LossCall:
    """Check what torch's function does not have, cast as autocast asks for, and flatten rows."""
    input, linear_weight, target, linear_bias, weight, *_ = given
    # Dynamo does not trace a grad_fn.
    if shards is None and not torch.compiler.is_compiling() and linear_weight.grad_fn is not None:
        check_not_local(linear_weight)
    shape = (*input.shape[:-1], *linear_weight.shape[1:-1])
    if target.is_floating_point():
        check_outputs_of_probabilities(loss_options.outputs)
    elif weight is not None:
        check_no_tangent("linear_cross_entropy", weight)
    if token_weight is not None:
        check_token_weight(token_weight, shape, input)
        token_weight = widen_to(input, token_weight).reshape(-1)
    weight = None if weight is None else widen_to(input, weight)
    if is_any_autocast_enabled():
        dtype = lower_precision_autocast_dtype(input)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    gradients = (False, False, False)
    if torch.is_grad_enabled():
        bias_grad = linear_bias is not None and linear_bias.requires_grad
        gradients = (input.requires_grad, linear_weight.requires_grad, bias_grad)
    if logit_options.softcap is not None:
        logit_options = logit_options.without_needless_softcap(accumulation_dtype(input.dtype))
    is_smoothed = True if loss_options.label_smoothing > 0 else False  # a branch makes it a constant of compiled code
    inputs = Inputs(
        input if input.dim() == 2 else input.reshape(math.prod(input.shape[:-1]), input.shape[-1]),
        linear_weight,
        linear_bias,
        target if target.dim() == 1 and target.dtype == torch.int64 else _rows_of_target(target, linear_weight),
        weight,
        logit_options,
        RequestedOutputs(is_smoothed, "entropy" in loss_options.outputs, loss_options.needs_tokens, gradients),
    )
    if logit_options.max_memory is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if any(tensor is not None and tensor.requires_grad for tensor in inputs[:5]):
            inputs.tile_rows()  # too little memory for the backward pass is refused now
    return LossCall(inputs, token_weight, loss_options, shape, shards, reduce_input_grad)


def _rows_of_target(target: Tensor, linear_weight: Tensor) -> Tensor:
    """Return the targets of all rows, the positions of a row one after the other."""
    if not target.is_floating_point():
        return target.reshape(-1).long()
    if linear_weight.dim() > 2:
        target = target.movedim(1, -1)
    return target.reshape(math.prod(target.shape[:-1]), target.shape[-1])
