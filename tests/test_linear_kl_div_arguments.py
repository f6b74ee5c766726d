"""linear_kl_div: a sentence for every argument that is wrong."""

import math

from torch_aclnn_ops import functional as F

import pytest
import torch

X, W, T, H = torch.ones(3, 2), torch.ones(4, 2), torch.ones(3, 5), torch.ones(4, 5)
HEADS = {"input": X, "linear_weight": W, "teacher_input": T, "teacher_weight": H}
LABELLED = {**HEADS, "target": torch.zeros(3, dtype=torch.int64)}
NUMBERS = {"input": X, "linear_weight": W}
TOP = (torch.tensor([[0, 1]] * 3), torch.full((3, 2), -1.0))
REFUSALS = {
    "divergence": ({**HEADS, "divergence": "kl"}, ValueError, "divergence must be one of 'forward_kl', .*'kl'"),
    "reduction": ({**HEADS, "reduction": "batchmean"}, ValueError, "reduction must be one of 'none', 'mean', 'sum'"),
    **{
        f"beta {beta}": (
            {**HEADS, "beta": beta},
            ValueError,
            f"beta must be at least 0 and at most 1, but it is {beta}",
        )
        for beta in (-0.1, 1.1, math.nan)
    },
    "beta 0 of the forward KL": ({**HEADS, "beta": 0.0}, ValueError, "beta must be 0.5, .*, but it is 0.0"),
    **{
        f"vocab_size {size}": ({**HEADS, "vocab_size": size}, error, f"vocab_size must be {accepted}, but it is {size}")
        for size, error, accepted in (
            (5, ValueError, "at most the 4 classes of every head"),
            (0, ValueError, "at least 1"),
            (2.0, TypeError, "an int"),
        )
    },
    "vocab_size and a process group": (
        {**HEADS, "vocab_size": 3, "process_group": object()},
        ValueError,
        "vocab_size must be None with process_group, but it is 3",
    ),
    "beta": ({**HEADS, "beta": "x"}, TypeError, "beta must be a number, but it is 'x'"),
    "beta of the reverse KL": (
        {**HEADS, "divergence": "reverse_kl", "beta": 0.1},
        ValueError,
        "beta must be 0.5, the default, with divergence='reverse_kl', but it is 0.1",
    ),
    "ignore_index without labels": ({**HEADS, "ignore_index": 0}, ValueError, "ignore_index must be -100, .*is 0"),
    "temperature": ({**HEADS, "temperature": 0}, ValueError, "temperature must be positive and finite"),
    "chunk_size": ({**HEADS, "chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
    "both": ({**HEADS, "chunk_size": 1, "max_memory": 9}, ValueError, "chunk_size and max_memory must not both be"),
    "no teacher": (NUMBERS, TypeError, "one of teacher_input and teacher_weight, or .* must be given, but none are"),
    "two teachers": ({**HEADS, "teacher_probs": X}, TypeError, "one of teacher_input .* must be given, but 2 are"),
    "half a teacher": (
        {**NUMBERS, "teacher_input": T},
        TypeError,
        "teacher_weight must be a plain tensor, but it is",
    ),
    "no tensor": ({**HEADS, "input": [1.0]}, TypeError, "input must be a plain tensor, but it is of type list"),
    "integers": ({**HEADS, "linear_weight": W.long()}, TypeError, "linear_weight must have a floating-point dtype"),
    "sparse": ({**HEADS, "input": X.to_sparse()}, TypeError, "input must have a floating-point dtype and be strided"),
    "dtypes": (
        {**HEADS, "linear_weight": W.double()},
        TypeError,
        "linear_weight must have dtype torch.float32, as",
    ),
    "teacher's dtypes": (
        {**HEADS, "teacher_weight": H.double()},
        TypeError,
        "teacher_weight must have dtype",
    ),
    "features": (
        {**HEADS, "linear_weight": H},
        ValueError,
        r"linear_weight must have shape \(V, 2\)",
    ),
    "bias": ({**HEADS, "linear_bias": torch.ones(3)}, ValueError, r"linear_bias must have shape \[4\]"),
    "no classes": ({**HEADS, "linear_weight": W[:0]}, ValueError, "linear_weight must have at least one class"),
    "rows": (
        {**HEADS, "teacher_input": T[:2]},
        ValueError,
        r"teacher_input must have the shape of input, \[3\], before its features, but it has shape \[2, 5\]",
    ),
    "classes": ({**HEADS, "teacher_weight": H[:3]}, ValueError, "teacher_weight must have 4 classes, .* it has 3"),
    "teacher's bias": ({**HEADS, "teacher_bias": torch.ones(3)}, ValueError, r"teacher_bias must have shape \[4\]"),
    "probabilities": ({**NUMBERS, "teacher_probs": X}, ValueError, r"teacher_probs must have shape \[3, 4\]"),
    "no pair": ({**NUMBERS, "teacher_top_k": X}, TypeError, "teacher_top_k must be a pair of tensors"),
    "no classes of some": ({**NUMBERS, "teacher_top_k": (X, X)}, TypeError, r"teacher_top_k\[0\] must have dtype"),
    "shapes of some": (
        {**NUMBERS, "teacher_top_k": (TOP[0], X[:, :1])},
        ValueError,
        r"teacher_top_k\[1\] must",
    ),
    "all classes": (
        {**NUMBERS, "teacher_top_k": (torch.arange(4).expand(3, 4), torch.zeros(3, 4))},
        ValueError,
        r"teacher_top_k\[0\] must have fewer than all 4 classes of a row, but it has 4",
    ),
    "a class outside": (
        {**NUMBERS, "teacher_top_k": (TOP[0] + 3, TOP[1])},
        IndexError,
        r"teacher_top_k\[0\] must have classes from 0 to 3, but it has the row \[3, 4\]",
    ),
    "a class twice": (
        {**NUMBERS, "teacher_top_k": (TOP[0] * 0, TOP[1])},
        ValueError,
        r"teacher_top_k\[0\] must have each class of a row once, but it has the row \[0, 0\]",
    ),
    "target": ({**HEADS, "target": torch.ones(3)}, ValueError, "target must have dtype torch.int64 or torch.uint8"),
    "target's shape": ({**HEADS, "target": torch.ones(2).long()}, ValueError, r"target must have shape \[3\]"),
    "ignore_index": ({**HEADS, "ignore_index": None}, TypeError, "ignore_index must be an int, but it is None"),
    "shift": ({**HEADS, "shift": True}, ValueError, "shift must be 0 without target, but it is True"),
    "too large a shift": (
        {**HEADS, "shift": 4, "target": torch.ones(3).long()},
        ValueError,
        "shift must be at least 0",
    ),
    "hard_weight without labels": (
        {**HEADS, "hard_weight": 0.7},
        ValueError,
        "hard_weight must be 0 without target, but it is 0.7",
    ),
    "negative hard_weight": (
        {**LABELLED, "hard_weight": -1.0},
        ValueError,
        "hard_weight must be at least 0 and finite, but it is -1.0",
    ),
    "hard_weight": ({**LABELLED, "hard_weight": True}, TypeError, "hard_weight must be a number, but it is True"),
    "token_weight": ({**HEADS, "token_weight": torch.ones(2)}, ValueError, "token_weight must have the shape of class"),
    "zero_if_all_ignored": ({**HEADS, "zero_if_all_ignored": 0}, TypeError, "zero_if_all_ignored must be a bool, but"),
    "sizes alone": ({**HEADS, "vocab_sizes": (4,)}, ValueError, "vocab_sizes must be None if process_group is None"),
    "no group": ({**HEADS, "process_group": "gloo"}, TypeError, "process_group must be None or a torch.distributed"),
}
REFUSALS |= {
    f"{name} requires grad": (
        {**(HEADS | {name: HEADS[name].clone().requires_grad_()})},
        RuntimeError,
        f"{name} must not require grad, because a teacher gets no gradient.* pass {name}.detach()",
    )
    for name in ("teacher_input", "teacher_weight")
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_refused_with_a_sentence(name):
    arguments, error, message = REFUSALS[name]
    with pytest.raises(error, match=f"^linear_kl_div: {message}"):
        F.linear_kl_div(**arguments)
