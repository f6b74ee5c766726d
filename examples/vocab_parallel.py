"""Training with the output head's rows sharded over the processes that ``torchrun`` has started.

Everything except the head is replicated, and every process sees the same text. So all processes compute the same
losses, and the same weights outside of the head.
"""

from functools import partial
from typing import Any

from torch_aclnn_ops import functional as F

import torch
import torch.distributed as dist
from lm_training import LARGEST_GRADIENT_NORM, Trainer
from text_data import VOCABULARY_SIZE
from torch import nn
from transformer import Transformer

HEAD = "head_weight"


class ShardedTransformer(Transformer):
    """A transformer whose head has only this process's rows."""

    def next_token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the full vocabulary."""
        return torch.cat(gather(super().next_token_logits(hidden)))


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all processes, which may differ in size, on the CPU."""
    arrays: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(arrays, tensor.detach().cpu().numpy())
    return [torch.as_tensor(array) for array in arrays]


class VocabParallelTrainer(Trainer):
    """Trains the transformer with this process's rows of the head.

    Checkpoints contain the whole head, like those of a single process: the first process writes them, and training can
    continue with any number of processes, including one.
    """

    model_type = ShardedTransformer

    def build_model(self) -> Transformer:
        """Return the new model of a single process with this process's part of the head."""
        model = super().build_model()
        sizes = [len(rows) for rows in torch.arange(VOCABULARY_SIZE).tensor_split(dist.get_world_size())]
        start = sum(sizes[: dist.get_rank()])
        self.rows = slice(start, start + sizes[dist.get_rank()])
        model.head_weight = nn.Parameter(model.head_weight[self.rows].detach().clone())
        model.linear_cross_entropy = partial(
            F.linear_cross_entropy, process_group=dist.group.WORLD, vocab_sizes=tuple(sizes)
        )
        return model

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, including the full head."""
        return super().parameters + (VOCABULARY_SIZE - len(self.model.head_weight)) * self.settings.width

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return dist.get_rank() == 0

    def agree(self, decision: bool) -> bool:
        """Return the first process's decision."""
        decisions = [decision]
        dist.broadcast_object_list(decisions, src=0)
        return decisions[0]

    def clip_gradients(self) -> None:
        """Clip the gradients by their norm, including that of the full head."""
        head = self.model.head_weight
        others = [parameter for parameter in self.model.parameters() if parameter is not head]
        of_head = head.grad.square().sum()
        dist.all_reduce(of_head)
        of_others = nn.utils.get_total_norm([parameter.grad for parameter in others if parameter.grad is not None])
        norm = (of_others.square() + of_head).sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM, norm)

    def contents(self) -> dict[str, Any]:
        """Return the contents of a checkpoint, with the full head."""
        contents = super().contents()
        contents["model"][HEAD] = torch.cat(gather(contents["model"][HEAD]))
        state = contents["optimizer"]["state"][self.head_index]
        contents["optimizer"]["state"][self.head_index] = {
            name: torch.cat(gather(value)) if value.dim() > 0 else value for name, value in state.items()
        }
        return contents

    def restore(self, contents: dict[str, Any]) -> None:
        """Continue from a checkpoint's contents."""
        contents["model"][HEAD] = contents["model"][HEAD][self.rows]
        state = contents["optimizer"]["state"][self.head_index]
        for name, value in state.items():
            if value.dim() > 0:
                state[name] = value[self.rows].clone()
        super().restore(contents)

    @property
    def head_index(self) -> int:
        """The head's index among the optimizer's parameters."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return next(i for i, parameter in enumerate(parameters) if parameter is self.model.head_weight)
