"""Draw how a call works, from calls that are made: ``python -m torch_aclnn_ops.host_npu -m benchmarks.call_picture``.

Writes docs/images/call_path.svg: the files of this package that a forward and a backward go through, the C++ that the
operator's file includes, and the functions of CANN that are called, on a CPU and on the host NPU.
"""

import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

from torch_aclnn_ops import explain, host_npu
from torch_aclnn_ops import functional as F

import torch
from torch import Tensor

from benchmarks.call_path import calls_of

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/call_path.svg"
CSRC = ROOT / "csrc"

_SUFFIX = "GetWorkspaceSize"  # of a phase one
# What a call only asks.
_NOT_DRAWN = ("_torch_compat/", "_extension.py")

_COLUMN, _LINE, _MARGIN, _HEAD = 344, 15, 12, 22
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-weight:bold}.m{font-family:monospace;font-size:11px}"
    "rect{rx:6;stroke:#5c6bc0;stroke-width:1}.l{fill:#556}"
)


class Lane(NamedTuple):
    """A layer of a column: its title, where it is, and what a call meets there."""

    title: str
    place: str
    names: tuple[str, ...]


def record() -> dict[str, list[Lane]]:
    """Make each call, and return the layers that it went through; needs the host NPU."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int, **options: torch.dtype) -> Tensor:
        return torch.rand(*shape, generator=generator).to(**options)

    input, target = rand(4, 3).requires_grad_(), rand(4, 3)
    on_npu = [tensor.detach().npu().requires_grad_() for tensor in (input, target)]
    hidden, head = (rand(rows, 64, dtype=torch.bfloat16).npu().requires_grad_() for rows in (16, 1000))
    classes = torch.arange(16).npu()
    path = explain(F.mse_loss, input, target).partition(",")[0]
    return {
        "F.mse_loss, tensors on cpu": [
            *_python_lanes(lambda: F.mse_loss(input, target)),
            Lane("its autograd function", "csrc/", _sources("cpu/functions.cpp")),
            Lane("torch", "its kernels for CPUs", tuple(path.split(": "))),
        ],
        "F.mse_loss, tensors on npu": _npu_lanes(lambda: F.mse_loss(*on_npu), "mse_loss"),
        "F.linear_cross_entropy, on npu": _npu_lanes(
            lambda: F.linear_cross_entropy(hidden, head, classes), "linear_cross_entropy"
        ),
    }


def _python_lanes(function: Callable[[], Tensor]) -> list[Lane]:
    files = list(dict.fromkeys(file for file, _ in calls_of(function) if not file.startswith(_NOT_DRAWN)))
    titles = {
        "functional": "the drop-in and its derivatives",
        "_autograd": "the form that autograd needs",
        "ops": "the raw operator and its kernels",
    }
    lanes = []
    for folder, title in titles.items():
        names = tuple(file.removeprefix(f"{folder}/") for file in files if file.startswith(f"{folder}/"))
        if names:
            lanes.append(Lane(title, f"torch_aclnn_ops/{folder}/", names))
    return lanes


def _npu_lanes(function: Callable[[], Tensor], operator: str) -> list[Lane]:
    function().backward()
    torch.npu.synchronize()
    host_npu.reset()
    host_npu.count_calls()
    function().backward()
    torch.npu.synchronize()
    called = {name for name in host_npu.stats().calls if name.startswith("acl") and not name.startswith("aclrt")}
    operators = sorted(name for name in called if name.startswith("aclnn") and "InplaceCopy" not in name)
    phase_one = tuple(name.removesuffix(_SUFFIX) for name in operators if name.endswith(_SUFFIX))
    phase_two = tuple(name for name in operators if not name.endswith(_SUFFIX))
    objects = tuple(sorted(name for name in called if not name.startswith("aclnn")))
    return [
        *_python_lanes(function),
        Lane("the extension", "csrc/", _sources(f"npu/{operator}.cpp")),
        Lane("CANN, phase one: check, plan", f"caller's thread; aclnn...{_SUFFIX}", (*objects, *phase_one)),
        Lane("torch_npu's queue; CANN, phase two", "in the queue's thread, on a stream", phase_two),
    ]


def _sources(name: str) -> tuple[str, ...]:
    """Return a file of csrc, the headers that it includes, and those that these do."""
    found = [name]
    for file in found:
        for header in re.findall(r'^#include "([\w./]+\.h)"', (CSRC / file).read_text(), re.MULTILINE):
            path = str((CSRC / file).parent.joinpath(header).resolve().relative_to(CSRC))
            if path not in found:
                found.append(path)
    return tuple(found)


def draw(columns: dict[str, list[Lane]]) -> str:
    """Return the picture, in SVG."""
    parts, bottom = [], 0
    for number, (title, lanes) in enumerate(columns.items()):
        x, y = _MARGIN + number * (_COLUMN + 2 * _MARGIN), _MARGIN
        for index, lane in enumerate([Lane("your program", title, ("forward", "backward")), *lanes]):
            height = _HEAD + _LINE * (len(lane.names) + 1) + 8
            shade = f"hsl(231 48% {96 - 4 * index}%)"
            parts.append(f'<rect x="{x}" y="{y}" width="{_COLUMN}" height="{height}" fill="{shade}"/>')
            lines = [("t", lane.title), ("l", lane.place), *(("m", name) for name in lane.names)]
            parts += _lines(x + 10, y + 18, lines)
            y += height
            if index < len(lanes):
                middle = x + _COLUMN // 2
                parts.append(f'<path d="M{middle} {y}v14m-4-5l4 5l4-5" stroke="#5c6bc0" fill="none"/>')
            y += 16
        bottom = max(bottom, y)
    width = len(columns) * (_COLUMN + 2 * _MARGIN)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" width="{width}" height="{bottom}">'
    background = f'<rect width="{width}" height="{bottom}" fill="white" stroke="none" rx="0"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", background, *parts, "</svg>\n"])


def _lines(x: int, y: int, lines: Iterable[tuple[str, str]]) -> list[str]:
    return [
        f'<text class="{style}" x="{x}" y="{y + _LINE * row}">{escape(text)}</text>'
        for row, (style, text) in enumerate(lines)
    ]


if __name__ == "__main__":
    PICTURE.write_text(draw(record()))
