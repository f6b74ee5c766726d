"""Count a call's launches on an NPU: operators of CANN and of torch_npu, which cost a device some microseconds each.

The profiler records nested calls of operators. Views and allocations launch nothing, and an operator that only calls
others, such as ``masked_fill``, counts as these.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks._harness import Call, compare
from benchmarks._results import Row

_NOTHING = (
    "_local_scalar_dense _reshape_alias _unsafe_view alias as_strided detach detach_ empty empty_like"
    " empty_strided expand item lift_fresh narrow new_empty permute reshape resize_ resolve_conj resolve_neg"
    " select set_ slice split split_with_sizes squeeze t to transpose unbind unflatten unsqueeze view view_as"
).split()
# This nested call shows that the host NPU ran an operator with a CPU kernel, whose other nested calls do not count.
_RUN_BY_HOST = "aten::resolve_conj"


def count_launches(call: Call) -> Counter[str]:
    """Return the number of launches of each operator in a call; the first call of anything may launch more."""
    call()
    with torch.autograd.profiler.profile(use_device=None) as profile:
        call()
        torch.npu.synchronize()
    roots = [event for event in profile.function_events if event.cpu_parent is None]
    return Counter(name for event in roots for name in _launched_by(event))


def compare_on_npu(cases: Mapping[str, Call], rounds: int, **columns: Any) -> list[Row]:
    """Compare single calls and their launches; unless the columns have ``wait``, the time is the host's."""
    launches = {by: count_launches(case).total() for by, case in cases.items()}
    rows = compare(cases, rounds, calls=1, before=torch.npu.synchronize, device="npu", **columns)
    return [{**row, "launches": launches[str(row["by"])]} for row in rows]


def _launched_by(event: Any) -> Iterator[str]:
    name, children = event.name, event.cpu_children
    is_list = name.startswith("aten::_foreach_")  # one launch for all tensors
    if not is_list and all(child.name != _RUN_BY_HOST for child in children):
        below = [launched for child in children for launched in _launched_by(child)]
        if below:
            yield from below
            return
    if name.startswith(("aclnn", "Hccl")) or (name.startswith("aten::") and name[6:] not in _NOTHING):
        yield name.removeprefix("aten::")
