"""Types of arguments that several functions share."""

from typing import Literal

Reduction = Literal["none", "mean", "sum"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
