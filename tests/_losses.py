"""Tables of the losses of an input and a target: of a drop-in, and of the raw operator that differentiates it."""

import torch

from tests._contract import Case
from tests._raw_operator import Refusal, Sample


def two(*shape):
    return lambda make: (make.normal(*shape), make.normal(*shape))


def cases(name):
    """Return the calls of a drop-in of this name with every reduction, and otherwise its defaults."""

    def call(**options):
        return lambda F, input, target: getattr(F, name)(input, target, **options)

    mean, none, total = call(), call(reduction="none"), call(reduction="sum")
    return [
        Case("mean", two(3, 5), mean),
        Case("sum of an odd shape", two(7, 1, 3), total),
        Case("none", two(2, 3), none),
        Case("zero dimensions", two(), mean),
        Case("no elements, none", two(0, 3), none),
        Case("no elements, sum", two(3, 0), total),
        Case("not contiguous", two(5, 3), lambda F, x, t: mean(F, x.T, t.T[:, ::1])),
        Case("strided", two(6, 4), lambda F, x, t: none(F, x[::2, 1:], t[1::2, :3])),
        Case("broadcast target", lambda make: (make.normal(4, 3), make.normal(3)), mean),
        Case("broadcast input", lambda make: (make.normal(1, 3), make.normal(4, 3)), none),
        Case("broadcast both", lambda make: (make.normal(4, 1), make.normal(1, 3)), total),
    ]


def _channels_last(make):
    return make.normal(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)


def samples(*options):
    """Return arguments of an operator of grad_output, self, target, reduction, and these options."""
    return [
        Sample("mean", lambda make: (make.normal(), make.normal(3, 4), make.normal(3, 4), 1, *options)),
        Sample("sum", lambda make: (make.normal(), make.normal(3, 4), make.normal(3, 4), 2, *options)),
        Sample("none", lambda make: (make.normal(3, 4), make.normal(3, 4), make.normal(3, 4), 0, *options)),
        Sample("broadcast", lambda make: (make.normal(3, 4), make.normal(4), make.normal(3, 1), 1, *options)),
        Sample("zero dimensions", lambda make: (make.normal(), make.normal(), make.normal(), 1, *options)),
        Sample("no elements", lambda make: (make.normal(), make.normal(0, 4), make.normal(0, 4), 1, *options)),
        Sample(
            "not contiguous",
            lambda make: (make.normal(4, 3).T, make.normal(3, 8)[:, ::2], make.normal(3, 4), 0, *options),
        ),
        Sample("transposed", lambda make: (make.normal(4, 3).T, make.normal(4, 3).T, make.normal(4, 3).T, 0, *options)),
        Sample("channels last", lambda make: (make.normal(), *(_channels_last(make) for _ in range(2)), 1, *options)),
        Sample(
            "transposed broadcast", lambda make: (make.normal(4, 3).T, make.normal(4, 3).T, make.normal(4), 0, *options)
        ),
        Sample(
            "nine dimensions", lambda make: (make.normal(), make.normal(*[2] * 9), make.normal(*[2] * 9), 1, *options)
        ),
    ]


def refusals(*options):
    return [
        Refusal(
            "dtype of grad_output",
            lambda make: (make.normal(3).half(), make.normal(3), make.normal(3), 1, *options),
            TypeError,
            "grad_output must have dtype torch.float32 as self has, but it has torch.float16",
        ),
        Refusal(
            "dtype of target",
            lambda make: (make.normal(3), make.normal(3), make.normal(3).double(), 1, *options),
            TypeError,
            "target must have dtype torch.float32 as self has, but it has torch.float64",
        ),
        Refusal(
            "integers",
            lambda make: (make.index(3, 3), make.index(3, 3), make.index(3, 3), 1, *options),
            TypeError,
            "self must have a floating-point dtype, but it has torch.int64",
        ),
        Refusal(
            "reduction",
            lambda make: (make.normal(3), make.normal(3), make.normal(3), 3, *options),
            ValueError,
            r"reduction must be 0 \(none\), 1 \(mean\) or 2 \(sum\), but it is 3",
        ),
        Refusal(
            "shapes",
            lambda make: (make.normal(3), make.normal(3), make.normal(4), 1, *options),
            ValueError,
            r"the shapes must broadcast together, but they are grad_output \[3\], self \[3\], target \[4\]",
        ),
    ]
