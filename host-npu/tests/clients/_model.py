"""A tiny language model and its data, the same on every device."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, TOKENS, STEPS = 128, 16, 6


def model(**options):
    """Return a model with the weights of seed 0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokenizer():
    """Return the tokenizer of the words w0, w1, ..., one for each token."""
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


def text(tokens):
    """Return tokens as words."""
    return " ".join(f"w{token}" for token in tokens)


def rows(count=4 * STEPS):
    """Return rows of repeating tokens, which a model can learn."""
    starts = torch.randint(3, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    return (starts + torch.arange(TOKENS) * 7) % (VOCABULARY - 3) + 3


def say(losses):
    """Print losses in the format that client_programs.py reads."""
    for loss in losses:
        print(f"loss {float(loss):.9g}", flush=True)
