"""The list of CANN's operators that torch_npu can call, and their implementation on the host NPU."""

import re
import textwrap

from host_npu import _functions, _libraries

_TITLES = {
    "checks": "Simulated with CANN's checks",
    "rules": "Computed by a formula, with CANN's documented dtypes and shapes",
    "formula": "Computed by a formula, with PyTorch's dtypes and shapes",
    "refused": "Refused",
}

# Operators that are simulated with all checks and called only by programs that call CANN directly.
_NOT_CALLED = ("aclnnApplyFusedEmaAdam", "aclnnMseLossOut")

# Chips on which the operator is refused, because CANN has no kernel for it.
_LACKING = {
    "aclnnAlltoAllvGroupedMatMul": ("Ascend910", "Ascend910B", "Ascend310P"),
    "aclnnApplyFusedEmaAdam": ("Ascend910", "Ascend310P"),
    "aclnnEmbeddingDenseBackward": ("Ascend310P",),
    "aclnnFusedCrossEntropyLossWithMaxSum": ("Ascend910", "Ascend310P"),
    "aclnnFusedLinearCrossEntropyLossGrad": ("Ascend910", "Ascend310P", "Ascend950"),
    "aclnnFusedLinearOnlineMaxSum": ("Ascend910", "Ascend310P", "Ascend950"),
    "aclnnGroupedMatMulAlltoAllv": ("Ascend910", "Ascend910B", "Ascend310P"),
}

# Chips on which jit_compile=True is the default.
_WITH_GRAPH_OPERATORS = ("Ascend910", "Ascend310P")

_INTRODUCTION = """\
# Operators of CANN

torch_npu {torch_npu} can call {total} operators of CANN, such as `aclnnRmsNorm`. `python -m host_npu --list` prints
this page for the installed torch_npu, and `python -m host_npu --list npu_rms_norm` the operators with that name.
{not_called}, which torch_npu does not call, are also simulated, with CANN's checks.

PyTorch's own operators run, also where the operator of the same name is refused: `torch.acos` does not need
`aclnnAcos` on the host NPU ([how it works](internals.md)). The lists matter for functions of torch_npu, such as
`torch_npu.npu_rms_norm`, and for programs that call CANN themselves.

A refused operator raises "the host NPU does not simulate aclnnX" at the call, and the program can go on. With
`TASK_QUEUE_ENABLE=2` the next copy or synchronization raises it, and [a refused option](limits.md) ends torch_npu's
queue.

**From a function of torch_npu to its operator:** leave out `npu_` and the underscores. `npu_rms_norm` calls
`aclnnRmsNorm`, others a version of it: `npu_grouped_matmul` calls `aclnnGroupedMatmulV5`. Other names: {other_names}.
torch_npu selects the operator by the chip and the arguments, too: on Ascend950, `npu_fusion_attention` calls
`aclnnFlashAttentionScoreV4`.

**ATB** (operators for serving): ReshapeAndCache, PagedCacheLoad, Rope, SelfAttention (PA_ENCODER and PREFIX_ENCODER),
PagedAttention, MLA, RingMLA, GroupTopk, FusedAddTopkDiv and Linear with accumulation are computed by a formula, without
quantization, and so are the Elewise that quantizes columns and the RmsNorm that quantizes. The others are refused.
"""

_OTHERS = "All others. `python -m host_npu --list NAME` says what becomes of those with a name."

_GRAPH_OPERATORS = """\
## Graph operators

These functions of torch_npu 2.13, among others, are computed by graph operators (aclop) on the default chip, and
refused at the call: {functions}.

`torch.npu.set_compile_mode(jit_compile=False)`, which many programs call, is the default, except on Ascend910 and
Ascend310P. With `jit_compile=True`, PyTorch's operators need graph operators, too. These are simulated: {simulated}.
The next synchronization refuses the others.
"""


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _paragraphs(text: str) -> str:
    """Wrap the lines of each paragraph."""
    return "\n\n".join(
        textwrap.fill(paragraph, 150, break_long_words=False, break_on_hyphens=False)
        for paragraph in text.split("\n\n")
    )


def page() -> str:
    """Return the list as Markdown; the host NPU must be enabled."""
    answers = _libraries.answers()
    other_names = ", ".join(
        f"`{function}` calls `aclnn{operator}...`" for function, operator in _functions.OTHER_NAMES.items()
    )
    introduction = _INTRODUCTION.format(
        total=len(answers),
        not_called=" and ".join(f"`{name}`" for name in _NOT_CALLED),
        other_names=other_names,
        **_libraries.versions(),
    )
    graph_operators = _GRAPH_OPERATORS.format(
        functions=_listed(_functions.GRAPH_FUNCTIONS), simulated=_listed(_libraries.graph_operators())
    )
    parts = [_paragraphs(introduction)]
    for answer, title in _TITLES.items():
        names = [name for name, given in answers.items() if given == answer]
        parts.append(f"## {title}: {len(names) or 'none'}")
        parts.append(_paragraphs(_OTHERS if answer == "refused" else _listed(names)))
    return "\n\n".join(filter(None, [*parts, _paragraphs(graph_operators)])) + "\n"


def _plain(name: str) -> str:
    """Return the common form of names of torch_npu and CANN: ``npu_rms_norm_v2`` and ``aclnnRmsNormV2`` are equal."""
    name = re.sub(r"^(torch_npu\.|torch\.ops\.npu\.)?_?(npu_|aclnn)", "", name)
    return re.sub(r"(_?[vV]\d+)?(_functional)?_?$", "", name).replace("_", "").lower()


def _operator_of_torch(operator: str) -> str | None:
    """Return PyTorch's operator with the name of a CANN operator, if any."""
    import torch

    words = re.findall(r"[A-Z][a-z0-9]*", re.sub(r"^aclnn(Inplace)?|V\d+$", "", operator))
    name = "_".join(words).lower()
    return f"aten.{name}" if name and hasattr(torch.ops.aten, name) else None


def is_of_torch_npu(name: str) -> bool:
    """Return whether torch_npu has a function of this name; the host NPU must be enabled."""
    import torch

    return hasattr(torch.ops.npu, name) or hasattr(torch.ops.atb, name)


def is_of_torch(name: str) -> bool:
    """Return whether PyTorch has an operator of this name."""
    import torch

    return hasattr(torch.ops.aten, name)


def _notes(name: str, wanted: str, answers: dict[str, str]) -> list[str]:
    """Return notes on what refused operators mean for programs."""
    refused = [operator for operator, answer in answers.items() if answer == "refused"]
    notes = []
    if {"refused"} < {answer for operator, answer in answers.items() if _plain(operator) == wanted}:
        notes.append("torch_npu selects the version by chip and arguments; a refused one raises an error at the call")
    own = dict.fromkeys(filter(None, map(_operator_of_torch, refused)))
    if (refused or not answers) and is_of_torch(name):
        own = {f"aten.{name}": None} | own
    if own:
        notes.append(f"PyTorch's own operators run on the host NPU all the same: {', '.join(own)}")
    return notes


def _all_answers() -> dict[str, str]:
    return dict.fromkeys(_NOT_CALLED, "checks") | _libraries.answers()


def _wanted(name: str) -> str:
    """Return the plain name of the operators that a torch_npu function calls."""
    function = name.rpartition(".")[2]
    first_version = re.sub(r"(_v\d+)?_?$", "", function)
    return _plain(_functions.OTHER_NAMES.get(function) or _functions.OTHER_NAMES.get(first_version, function))


def _alike(wanted: str, answers: dict[str, str]) -> list[str]:
    """Return the operators whose plain names contain this one: refused ones last, most similar names first."""
    places = {operator: _place(wanted, operator) for operator in answers}
    alike = [operator for operator, place in places.items() if place >= 0]
    alike.sort(key=lambda operator: (answers[operator] == "refused", places[operator], len(operator)))
    return alike


def _gradients(function: str, answers: dict[str, str]) -> list[str]:
    """Return CANN's gradients, ``aclnnRmsNormGrad`` for ``npu_rms_norm_backward``, in the order of :func:`_alike`."""
    parts = re.fullmatch(r"(.+?)_?(backward|grad|bk)(_v\d+)?", function)
    if parts is None:
        return []
    gradient = re.compile(re.escape(_wanted(parts[1])) + r"(v\d+)?(\w*score)?(grad|backward)")
    operators = [operator for operator in answers if gradient.fullmatch(_plain(operator))]
    return sorted(operators, key=lambda operator: (answers[operator] == "refused", len(operator)))


def _place(wanted: str, operator: str) -> int:
    """Return the index of the word of an operator's plain name at which ``wanted`` begins, or -1."""
    plain = _plain(operator)
    words = re.finditer(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|[a-z]+|\d+", operator.removeprefix("aclnn"))
    return next((word.start() for word in words if plain.startswith(wanted, word.start())), -1)


def is_refused(operator: str) -> bool:
    """Return whether the host NPU refuses an operator; the host NPU must be enabled."""
    return _libraries.answers().get(operator) == "refused"


def _line_of_atb(function: str) -> str:
    computed = [operator for begin, operator in _functions.ATB.items() if function.startswith(begin)]
    if not computed or function.endswith("_quant"):
        return f"{function}: refused, an operator of ATB"
    return f"{function}: ATB's {computed[0]}, computed by a formula; some options are refused"


def _line(operator: str, answers: dict[str, str], soc: str) -> str:
    if operator in answers:
        title = _TITLES[answers[operator]]
        lacking = f", but {soc} has no kernel of it" if soc in _LACKING.get(operator, ()) else ""
        return f"{operator}: {title[0].lower()}{title[1:]}{lacking}"
    is_simulated = operator in _libraries.graph_operators()
    return f"{operator}: {'simulated' if is_simulated else 'refused'}, a graph operator (aclop)"


def _is_graph_operator(function: str) -> bool:
    """Return whether torch_npu implements a function, or the function of a gradient, with a graph operator."""
    whole = re.sub(r"_(backward|fwd|grad)$", "", function)
    return whole in _functions.GRAPH_FUNCTIONS or function in _functions.PARTS_OF_GRAPH_FUNCTIONS


def found(name: str, soc: str = "") -> list[str]:
    """Return a line for each operator whose name contains this one, and notes; the host NPU must be enabled.

    Refused operators come last, the most similar names first.
    """
    import torch

    function = name.rpartition(".")[2]
    if hasattr(torch.ops.atb, function):
        return [_line_of_atb(function)]
    if function in _functions.ANSWERS:
        return [f"{function}: {_functions.ANSWERS[function]}"]
    wanted, answers = _wanted(name), _all_answers()
    called = [f"aclnn{_functions.CALLED[function]}"] if function in _functions.CALLED else []
    alike = [operator for operator in called if operator in answers]
    alike = alike or _alike(wanted, answers) or _gradients(function, answers)
    own = _functions.SIMULATED_FUNCTIONS.get(function, function)
    is_graph_operator = _is_graph_operator(own) or own in _libraries.graph_operators()
    lines = [_line(own, answers, soc)] if is_graph_operator else []
    lines += [_line(operator, answers, soc) for operator in alike]
    if alike and soc in _WITH_GRAPH_OPERATORS and is_of_torch_npu(function):
        lines.append(f"On {soc} torch_npu calls graph operators instead, unless set_compile_mode(jit_compile=False)")
    return lines + _notes(function, wanted, {operator: answers[operator] for operator in alike})
