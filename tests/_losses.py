"""Tables of the losses of an input and a target: of a drop-in, and of the raw operator that differentiates it."""

import torch

from tests._contract import Case
from tests._raw_operator import ErrorInput, Sample


def cases(name, target=None, broadcasts=("target", "input", "both")):
    """Return the calls of a drop-in of this name with every reduction, and otherwise its defaults.

    ``target`` makes a target of ``make`` and a shape, if it is not one to differentiate by; ``broadcasts`` says which
    of the tensors may have another shape than the loss.
    """

    def call(**options):
        return lambda F, input, target: getattr(F, name)(input, target, **options)

    def case(case_name, shape, target_shape, function):
        if target is None:
            return Case(case_name, lambda make: (make.normal(*shape), make.normal(*target_shape)), function)
        return Case(
            case_name, lambda make: (make.normal(*shape),), function, lambda make: (target(make, *target_shape),)
        )

    mean, none, total = call(), call(reduction="none"), call(reduction="sum")
    broadcast = {
        "target": case("broadcast target", (4, 3), (3,), mean),
        "input": case("broadcast input", (1, 3), (4, 3), none),
        "both": case("broadcast both", (4, 1), (1, 3), total),
    }
    return [
        case("mean", (3, 5), (3, 5), mean),
        case("sum of an odd shape", (7, 1, 3), (7, 1, 3), total),
        case("none", (2, 3), (2, 3), none),
        case("zero dimensions", (), (), mean),
        case("no elements, none", (0, 3), (0, 3), none),
        case("no elements, sum", (3, 0), (3, 0), total),
        case("not contiguous", (5, 3), (5, 3), lambda F, x, t: mean(F, x.T, t.T[:, ::1])),
        case("strided", (6, 4), (6, 4), lambda F, x, t: none(F, x[::2, 1:], t[1::2, :3])),
        *(broadcast[one] for one in broadcasts),
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


def error_inputs(*options):
    return [
        ErrorInput(
            "dtype of grad_output",
            lambda make: (make.normal(3).half(), make.normal(3), make.normal(3), 1, *options),
            TypeError,
            "grad_output must have dtype torch.float32 as self has, but it has torch.float16",
        ),
        ErrorInput(
            "dtype of target",
            lambda make: (make.normal(3), make.normal(3), make.normal(3).double(), 1, *options),
            TypeError,
            "target must have dtype torch.float32 as self has, but it has torch.float64",
        ),
        ErrorInput(
            "integers",
            lambda make: (make.index(3, 3), make.index(3, 3), make.index(3, 3), 1, *options),
            TypeError,
            "self must have a floating-point dtype, but it has torch.int64",
        ),
        ErrorInput(
            "reduction",
            lambda make: (make.normal(3), make.normal(3), make.normal(3), 3, *options),
            ValueError,
            r"reduction must be 0 \(none\), 1 \(mean\) or 2 \(sum\), but it is 3",
        ),
        ErrorInput(
            "shapes",
            lambda make: (make.normal(3), make.normal(3), make.normal(4), 1, *options),
            ValueError,
            r"the shapes must broadcast together, but they are grad_output \[3\], self \[3\], target \[4\]",
        ),
    ]
