"""Compare torch's operators on the host NPU with the CPU, with sample calls from torch's OpInfo database."""

import sys
import types
import unittest
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_SAMPLES = 4
MOST_ELEMENTS = 20_000

# Operators whose arguments are CPU tensors on every device.
_ARGUMENTS_OF_THE_HOST = ("tensor_split",)


class _FindsRandom(TorchDispatchMode):
    """Detects whether an operator draws random numbers, which differ between devices."""

    found = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.found |= torch.Tag.nondeterministic_seeded in operator.tags
        return operator(*args, **(kwargs or {}))


def operators() -> list[Any]:
    """Return the database."""
    # The database's module also imports torch's TestCase, whose base class the database does not need.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=lambda operator: (operator.name, operator.variant_test_name))


def name_of(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else operator.name


def _is_differentiable(operator: Any, dtype: torch.dtype) -> bool:
    return operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")


def _samples(operator: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    found = []
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=_is_differentiable(operator, dtype)):
        tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if torch.is_tensor(leaf)]
        if sum(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS:
            found.append(sample)
    # From the first to the last sample: databases begin with the simplest ones.
    step = max(1, len(found) // MOST_SAMPLES)
    return found[::step][:MOST_SAMPLES]


def _on(device: str, operator: Any, sample: Any) -> Any:
    """Return the input and arguments of a sample on a device, in separate memory."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            copied = tensor.detach().clone() if device == "cpu" else tensor.detach().to(device)
            moved[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        return moved[id(tensor)]

    if operator.name in _ARGUMENTS_OF_THE_HOST:
        return move(sample.input), sample.args, sample.kwargs
    arguments = tree_map_only(torch.Tensor, move, (sample.input, sample.args, sample.kwargs))
    return tree_map_only(torch.device, lambda _: torch.device(device), arguments)


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not inputs:
        return []
    weights = [
        torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape).to(output.dtype).to(output.device)
        for output in differentiable
    ]
    return list(torch.autograd.grad(differentiable, inputs, weights, allow_unused=True))


def _run(operator: Any, sample: Any, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return outputs and gradients, on the CPU."""
    input, args, kwargs = _on(device, operator, sample)
    torch.manual_seed(0)
    inputs = [leaf for leaf in tree_leaves((input, args, kwargs)) if torch.is_tensor(leaf) and leaf.requires_grad]
    result = sample.output_process_fn_grad(operator(input, *args, **kwargs))
    outputs = [torch.as_tensor(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor | float | int)]
    gradients = _gradients(outputs, inputs)
    return (
        [output.detach().cpu() for output in outputs],
        [None if gradient is None else gradient.detach().cpu() for gradient in gradients],
    )


def _draws_random_numbers(operator: Any, sample: Any) -> bool:
    input, args, kwargs = _on("cpu", operator, sample)
    with _FindsRandom() as mode:
        operator(input, *args, **kwargs)
    return mode.found


def _in_float32(operator: Any, sample: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the CPU's results for the same numbers in float32, rounded once."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        is_narrow = tensor.dtype == torch.bfloat16
        return tensor.detach().float().requires_grad_(tensor.requires_grad) if is_narrow else tensor

    arguments = tree_map_only(torch.Tensor, wide, (sample.input, sample.args, sample.kwargs))
    results = _run(
        operator,
        types.SimpleNamespace(
            **dict(zip(("input", "args", "kwargs"), arguments, strict=True)),
            output_process_fn_grad=sample.output_process_fn_grad,
        ),
        "cpu",
    )
    return tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.dtype == torch.float32 else t, results)


def _is_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.layout != torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    actual, expected = actual.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg()
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(
        actual.nan_to_num(0) if actual.is_floating_point() or actual.is_complex() else actual,
        expected.nan_to_num(0) if expected.is_floating_point() or expected.is_complex() else expected,
    )


def _differences(what: str, actual: list[Any], expected: list[Any], is_random: bool) -> tuple[list[str], bool]:
    """Return the differences, and whether all matching results are equal bit for bit."""
    if len(actual) != len(expected):
        return [f"{len(actual)} {what}s instead of {len(expected)}"], True
    wrong, exact = [], True
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if other is None:
            continue
        if one is None:
            wrong.append(f"{what} {index} is missing")
            continue
        if one.dtype != other.dtype:
            wrong.append(f"{what} {index} is {one.dtype}, not {other.dtype}")
            other = other.to(one.dtype)
        if (one.shape, one.layout) != (other.shape, other.layout):
            wrong.append(f"{what} {index} is {one.layout} {tuple(one.shape)}, not {other.layout} {tuple(other.shape)}")
        elif not is_random and not _is_equal(one, other):
            exact = False
            try:
                torch.testing.assert_close(one, other, equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{what} {index}: {' '.join(str(error).split())}")
    return wrong, exact


def _is_no_worse(actual: list[Any], cpus: list[Any], wide: list[Any]) -> bool:
    """Return whether results are as close to float32's as those of a CPU that accumulates in 16 bits."""
    return all(
        one is other is None or (one.float() - truth.float()).norm() <= 1.5 * (other.float() - truth.float()).norm()
        for one, other, truth in zip(actual, cpus, wide, strict=True)
    )


def compare(operator: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return an operator's faults, the NPU's refusals, and whether its numbers equal the CPU's."""
    faults: list[str] = []
    refusals: list[str] = []
    exact, compared, random = True, 0, 0
    for sample in _samples(operator, dtype):
        try:
            expected = _run(operator, sample, "cpu")
        except Exception:  # samples that the CPU refuses are skipped
            continue
        is_random = _draws_random_numbers(operator, sample) or "empty" in operator.name
        try:
            actual = _run(operator, sample, "npu")
            torch.npu.synchronize()
        except Exception as error:
            refusals.append(" ".join(str(error).split()))
            continue
        compared += 1
        random += is_random
        for what, results, truths in zip(("output", "gradient"), actual, expected, strict=True):
            # torch_npu replaces a few CPU kernels, which then have no gradients.
            if what == "gradient" and not truths:
                continue
            wrong, is_exact = _differences(what, results, truths, is_random)
            exact &= is_exact
            if wrong and dtype == torch.bfloat16 and not is_exact:
                # A CPU rounds intermediate results to 16 bits.
                wide = _in_float32(operator, sample)[what == "gradient"]
                wrong, _ = _differences(what, results, wide, is_random)
                if wrong and _is_no_worse(results, truths, wide):
                    wrong = []
            faults += wrong
    return {"faults": faults, "refusals": refusals, "exact": exact, "compared": compared, "random": random}


def compare_some(
    device: str, dtypes: Sequence[str], first: int, step: int, also: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return each dtype's results of operators with index ``first`` modulo ``step``, and of those in ``also``.

    The name of an operator is printed before it is called, so that the output of a crash ends with it.
    """
    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = [{} for _ in dtypes]
    for number, operator in enumerate(operators()):
        name = name_of(operator)
        for dtype, others, results in zip(dtypes, also, found, strict=True):
            if (number % step == first or name in others) and operator.supports_dtype(getattr(torch, dtype), "cpu"):
                print(name, dtype, flush=True)
                results[name] = compare(operator, getattr(torch, dtype))
    return found
