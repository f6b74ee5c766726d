"""Checks of the arguments of torch_aclnn_ops.plan."""

import dataclasses

from torch_aclnn_ops._plan_costs import Layers, Model, least_parameters

SHAPE = ("hidden", "vocab", "parameters")


def check_model(model: Model) -> None:
    """Check the numbers of a shape."""
    check_counts({name: getattr(model, name) for name in SHAPE})
    if model.layers is not None:
        _check_layers(model, model.layers)
    least = least_parameters(model)
    if model.parameters < least:
        of_layers = "" if model.layers is None else f" and the matrices of {model.layers.number} layers"
        raise ValueError(
            f"plan: parameters must be at least {least}, of the head of {model.vocab} x {model.hidden}{of_layers}, but"
            f" it is {model.parameters}"
        )


def _check_layers(model: Model, layers: Layers) -> None:
    if not isinstance(layers, Layers):
        raise TypeError(f"plan: layers must be None or a Layers, but it is {layers!r}")
    check_counts({name: number for name, number in dataclasses.asdict(layers).items() if number is not None})
    if layers.head_dim is None and model.hidden % layers.heads:
        raise ValueError(
            f"plan: heads must divide hidden = {model.hidden} if head_dim is not given, but it is {layers.heads}"
        )
    if layers.heads % layers.kv_heads:
        raise ValueError(f"plan: kv_heads must divide heads = {layers.heads}, but it is {layers.kv_heads}")


def check_counts(numbers: dict[str, object]) -> None:
    """Raise for a number that is not an integer of at least 1."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"plan: {name} must be an integer of at least 1, but it is {number!r}")
        if number < 1:
            raise ValueError(f"plan: {name} must be an integer of at least 1, but it is {number}")
