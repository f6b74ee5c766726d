"""Trains a tiny Llama of transformers with its own attention for NPUs on the host NPU, and with plain torch on the CPU.

Run it with ``python -m host_npu host-npu/examples/transformers_llama.py``. It prints both losses of every step.
"""

import argparse

import torch
import torch.nn.functional as F
import transformers

_TOKENS, _VOCABULARY = 24, 64


def make_model(attention: str) -> transformers.PreTrainedModel:
    """Returns a Llama of two layers with random weights, the same for every attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_TOKENS,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def train(device: str, dtype: torch.dtype, steps: int) -> list[float]:
    """Returns the losses of a training, with transformers' attention for NPUs on an NPU and SDPA on a CPU."""
    # On an NPU transformers takes npu_fusion_attention for this. Weights are float32, and the model computes with casts
    # of them.
    model = make_model("flash_attention_2" if device == "npu" else "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_VOCABULARY, (2, _TOKENS), generator=generator).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        weights = {name: each.to(dtype) for name, each in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": tokens, "use_cache": False}).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Prints the losses of both trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    for step, losses in enumerate(zip(*(train(each, dtype, options.steps) for each in ("npu", "cpu")), strict=True)):
        print(f"step {step}: {losses[0]:.6f} on the NPU, {losses[1]:.6f} on the CPU")


if __name__ == "__main__":
    main()
