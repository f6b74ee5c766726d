"""Arguments of the linear cross entropy on an NPU."""

import torch

from tests._contract import Maker


def linear_case(dtype, rows=24, classes=160, features=16, seed=0):
    make = Maker(dtype, seed)
    target = make.index(classes, rows)
    target[3] = -100
    return make.normal(rows, features), make.normal(classes, features) * 0.2, target


# Options that the fused operators do not support, by the reason that explain() shows.
CHUNKED = {
    "of linear_bias": {"linear_bias": torch.zeros(160, dtype=torch.bfloat16)},
    "of softcap": {"softcap": 30.0},
    "of temperature": {"temperature": 0.7},
    "of chunk_size": {"chunk_size": 8},
    "of max_memory": {"max_memory": 2**20},
    "of label_smoothing": {"label_smoothing": 0.1},
    "entropy is requested": {"outputs": ("entropy",)},
    "predicted tokens are requested": {"outputs": ("token_accuracy",)},
}
