"""Megatron Core with torch_npu's ``transfer_to_npu`` and tensor parallelism over all ranks: ``gpt.py``.

Every rank draws the weights of the whole model and keeps its part, so the losses are those of one rank.
"""

import os

import torch
from torch_npu.contrib import transfer_to_npu  # noqa: F401

# Imported once the functions of torch.cuda have been replaced.
from megatron.core import parallel_state  # isort: skip
from _model import STEPS, TOKENS, VOCABULARY, rows, say
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
ranks = torch.distributed.get_world_size()
parallel_state.initialize_model_parallel(ranks)
model_parallel_cuda_manual_seed(1)
torch.manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0,
    use_cpu_initialization=True, gradient_accumulation_fusion=False, tensor_model_parallel_size=ranks,
)  # fmt: skip
model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, TOKENS).cuda()
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
# Megatron's gradient clipping uses the type torch.cuda.FloatTensor, which MindSpeed replaces.
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [model])
batches = iter(rows().split(2))
positions = torch.arange(TOKENS - 1).expand(2, -1).cuda()
mask = torch.ones(TOKENS - 1, TOKENS - 1, dtype=torch.bool).triu(1)[None, None].cuda()


def forward(batches, model):
    """Return the losses of a micro batch and the function that reduces them."""
    batch = next(batches).cuda()
    losses = model(batch[:, :-1].contiguous(), positions, mask, labels=batch[:, 1:].contiguous())
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


found = []
for _ in range(STEPS):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reduced = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=batches, model=[model], num_microbatches=2, seq_length=TOKENS - 1,
        micro_batch_size=2,
    )  # fmt: skip
    finalize_model_grads([model])
    optimizer.step()
    found += [entry["loss"].item() for entry in reduced]
if torch.distributed.get_rank() == 0:
    say(found)
torch.distributed.destroy_process_group()
