"""The tables of docs/scale.md: what torch_aclnn_ops.plan finds for some models and numbers of devices."""

from pathlib import Path

from torch_aclnn_ops.plan import MODELS, Plan, plan

from benchmarks._results import format_table

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
# Devices, and how many of them split a vocabulary.
_CUTS = {
    "llama-3-8b": ((8, 1), (16, 1), (16, 8)),
    "llama-3-70b": ((32, 1), (64, 1), (64, 8)),
    "qwen2.5-72b": ((32, 1), (64, 1), (64, 8)),
    "deepseek-v3": ((256, 1), (512, 1), (512, 8)),
}
# Of which models the table of answers is, with how many devices that split the matrices, and on how many devices.
_FITS = [(name, parallel) for name, model in MODELS.items() if model.layers for parallel in (1, 8)]
_DEVICES = (8, 16, 32, 64, 128)
_USABLE = 60  # of 64 GiB: the rest is left to CANN, HCCL and fragmentation
_GIB = 2**30


def texts() -> dict[str, str]:
    """Return the generated sections of the page by title."""
    plans = [
        (name, plan(name, devices, tensor_parallel=parallel)) for name in MODELS for devices, parallel in _CUTS[name]
    ]
    return {
        "fits": format_table([_fits(name, parallel, saved) for name, parallel in _FITS for saved in (True, False)]),
        "memory": format_table([_memory(name, found) for name, found in plans]),
        "time": format_table([_time(name, found) for name, found in plans]),
        "collectives": format_table([_collectives(name, found) for name, found in plans]),
    }


def _where(name: str, found: Plan) -> dict[str, str]:
    return {"model": name, "devices": str(found.devices), "tensor parallel": str(found.tensor_parallel)}


def _fits(name: str, parallel: int, checkpointing: bool) -> dict[str, str]:
    def answer(devices: int) -> str:
        found = plan(name, devices, tensor_parallel=parallel, checkpointing=checkpointing, memory=_USABLE)
        return "; ".join("yes" if found.fits(costs) else "no" for costs in (found.others, found.ours))

    where = {"model": name, "tensor parallel": str(parallel), "checkpointing": "yes" if checkpointing else "no"}
    return {**where, **{f"{devices} devices": answer(devices) for devices in _DEVICES}}


def _memory(name: str, found: Plan) -> dict[str, str]:
    def both(part: str) -> str:
        return "; ".join(f"{getattr(costs, part) / _GIB:.1f}" for costs in (found.others, found.ours))

    def of_layers(part: str) -> str:
        return f"{getattr(found.ours, part) / _GIB:.1f}" if found.model.layers else "unknown"

    return {
        **_where(name, found),
        "states": f"{found.ours.states / _GIB:.1f}",
        "activations": of_layers("activations"),
        "a layer's backward pass": of_layers("layer_backward"),
        "head's weight": f"{found.ours.head_weight / _GIB:.1f}",
        "head's backward pass": both("head_backward"),
        "step's buffers": both("step_buffers"),
        "remaining of 64": "; ".join(f"{found.left(costs) / _GIB:.1f}" for costs in (found.others, found.ours)),
    }


def _time(name: str, found: Plan) -> dict[str, str]:
    both = (found.others, found.ours)
    return {
        **_where(name, found),
        "head, ms": "; ".join(f"{costs.head_seconds * 1e3:.1f}" for costs in both),
        "step and EMA, ms": "; ".join(f"{costs.optimizer_seconds * 1e3:.1f}" for costs in both),
    }


def _collectives(name: str, found: Plan) -> dict[str, str]:
    sent = plan(name, 16, tensor_parallel=8).collectives  # with every collective, for the columns
    return {**_where(name, found), **{what: f"{found.collectives.get(what, 0) / _GIB:.3f}" for what in sent}}
