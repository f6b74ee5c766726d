"""The list of CANN's operators that torch_npu can ask for, and what the host NPU does with each."""

import textwrap

from host_npu import _libraries

_TITLES = {
    "checks": "Simulated with CANN's checks",
    "rules": "Computed by a formula, with CANN's documented dtypes and shapes",
    "formula": "Computed by a formula, with PyTorch's dtypes and shapes",
    "refused": "Refused",
}

_INTRODUCTION = """\
# Operators of CANN

torch_npu {torch_npu} asks for {total} aclnn functions. This page is made by `python -m host_npu --list`, which says the
same of the installed torch_npu. Operators of aten are not on it: they run, see [how it works](internals.md).

What is refused raises an error at the call, "the host NPU does not simulate aclnnX", and the program can go on (with
TASK_QUEUE_ENABLE=2 at the next copy or synchronization). So do graph operators (aclop).

After jit_compile=True the next synchronization refuses them. Simulated are then those that PyTorch's operators need:
{graph_operators}.

Of ATB, ReshapeAndCache, Rope, SelfAttention (encoders of sequences of any length, without and with a cache),
PagedAttention, GroupTopk and the accumulating Linear are computed by a formula, without quantization; the others are
refused.
"""


def page() -> str:
    """Return the list as Markdown; the host NPU must be enabled."""
    answers = _libraries.answers()
    graph_operators = textwrap.fill(", ".join(_libraries.graph_operators()), 120)
    parts = [_INTRODUCTION.format(total=len(answers), graph_operators=graph_operators, **_libraries.versions())]
    for answer, title in _TITLES.items():
        names = [f"`{name}`" for name, given in answers.items() if given == answer]
        lines = textwrap.fill(", ".join(names), 120, break_long_words=False, break_on_hyphens=False)
        parts.append(f"## {title}: {len(names)}\n\n{lines}\n" if names else f"## {title}: none\n")
    return "\n".join(parts)
