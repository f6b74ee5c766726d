"""The Python standard library's sources as tokens for a language model."""

import hashlib
import math
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from atomic_save import save_atomically
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 4096
END_OF_FILE = "<|endoffile|>"
VALIDATION_FILE_EVERY = 20
# Third-party packages differ between machines, and the others are mostly tables and test fixtures.
EXCLUDED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True)
class TextData:
    """A tokenized text, split by file into training and validation parts."""

    tokenizer: Tokenizer
    training: torch.Tensor
    validation: torch.Tensor
    fingerprint: str


def load_text_data(cache_directory: Path) -> TextData:
    """Tokenize the standard library, or read the tokens from ``cache_directory`` if they are cached."""
    texts = read_standard_library()
    fingerprint = fingerprint_of(texts)
    cache = cache_directory / f"tokens-{fingerprint[:16]}.pt"
    if not cache.exists():
        save_atomically(tokenise(texts), cache)
    contents = torch.load(cache, weights_only=True)
    return TextData(
        Tokenizer.from_str(contents["tokenizer"]), contents["training"], contents["validation"], fingerprint
    )


def read_standard_library() -> list[str]:
    """Return the Python sources of the installed standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = sorted(path.as_posix() for path in paths if EXCLUDED_DIRECTORIES.isdisjoint(path.parts))
    if len(kept) < VALIDATION_FILE_EVERY:
        raise FileNotFoundError(f"the standard library at {root} has {len(kept)} Python sources: too few to train on")
    return [(root / path).read_text(encoding="utf-8", errors="replace") for path in kept]


def fingerprint_of(texts: list[str]) -> str:
    """Return a digest of everything the tokens depend on."""
    settings = (VOCABULARY_SIZE, END_OF_FILE, VALIDATION_FILE_EVERY, platform.python_version(), tokenizers.__version__)
    digest = hashlib.sha256(repr(settings).encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def tokenise(texts: list[str]) -> dict[str, str | torch.Tensor]:
    """Train a byte-level BPE on the training files and apply it to all files."""
    is_validation = [index % VALIDATION_FILE_EVERY == VALIDATION_FILE_EVERY - 1 for index in range(len(texts))]
    tokenizer = train_tokenizer([text for text, held_out in zip(texts, is_validation, strict=True) if not held_out])
    (end_of_file,) = tokenizer.encode(END_OF_FILE).ids
    training: list[int] = []
    validation: list[int] = []
    for encoding, held_out in zip(tokenizer.encode_batch(texts), is_validation, strict=True):
        (validation if held_out else training).extend([*encoding.ids, end_of_file])
    return {
        "tokenizer": tokenizer.to_str(),
        "training": torch.tensor(training),
        "validation": torch.tensor(validation),
    }


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with ``VOCABULARY_SIZE`` tokens on ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_properties(tokenizer: Tokenizer) -> torch.Tensor:
    """Return for every token the logarithm of its length in characters, and 1 if it begins with a letter or a digit."""
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(VOCABULARY_SIZE)]
    return torch.tensor([[math.log(max(len(text), 1)), float(text[:1].isalnum())] for text in texts])


def windows_at(tokens: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of ``context`` tokens from ``starts`` as inputs, and the tokens that follow each as targets."""
    windows = tokens[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def random_batch(
    tokens: torch.Tensor, batch_size: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the inputs and targets of one training step."""
    return windows_at(tokens, torch.randint(len(tokens) - context, (batch_size,), generator=generator), context)


def evenly_spaced_batches(
    tokens: torch.Tensor, batch_size: int, context: int, windows: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets spread evenly over ``tokens``, the same on every call."""
    starts = torch.arange(windows) * (len(tokens) - context - 1) // max(windows - 1, 1)
    return [windows_at(tokens, part, context) for part in starts.split(batch_size)]


def unigram_cross_entropy(training: torch.Tensor, validation: torch.Tensor) -> float:
    """Return the nats per validation token if every token is predicted by its frequency in training alone."""
    # Every count is incremented, so that a token that is not in training still has a probability.
    counts = torch.bincount(training, minlength=VOCABULARY_SIZE).double() + 1
    return float(-(counts / counts.sum()).log()[validation].mean())
