"""Matrix products with a collective on two ranks, for test_collective_matmuls.py."""

import os
import signal

import torch
import torch.distributed as dist
from host_npu import testing

ROWS, INNER, COLUMNS = 6, 256, 5


def name_of_group():
    """Return the name of the communicator of all ranks."""
    return dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())


def _of_rank(rank, dtype, rows=ROWS):
    """Return x1, x2, bias and x3 of a rank, which all ranks can compute."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (rows, INNER), (INNER, COLUMNS), (COLUMNS,), (rows, COLUMNS)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _ratio(found, wanted, terms, dtype):
    """Return the largest error, relative to rounding each term and the result to a dtype after float32 sums."""
    assert found.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 * (sum(term.abs() for term in terms) + wanted.abs()) * 1.01 + 1e-4
    return ((found.cpu().double() - wanted).abs() / bound).max().item()


def _terms(dtype, with_bias=False, with_x3=False):
    terms = []
    for rank in range(dist.get_world_size()):
        x1, x2, bias, x3 = (each.double() for each in _of_rank(rank, dtype))
        terms.append(x1 @ x2 + bias * with_bias + x3 * with_x3)
    return terms


def _transposed(matrix):
    """Return the same matrix with contiguous columns."""
    return matrix.t().contiguous().t()


def _all_reduce(dtype, *, bias=False, x3=False, transposed=False, batches=False, **options):
    left, right, summand, other = (each.npu() for each in _of_rank(dist.get_rank(), dtype))
    right = _transposed(right) if transposed else right
    options |= {"bias": summand} if bias else {}
    if batches:
        left = left.unflatten(0, (2, -1))
        other = other.unflatten(0, (2, -1))
    options |= {"x3": other} if x3 else {}
    found = torch.ops.npu.npu_mm_all_reduce_base(left, right, name_of_group(), **options)
    terms = _terms(dtype, bias, x3)
    return _ratio(found.flatten(0, -2), sum(terms), terms, dtype)


def _all_gather(dtype, *, bias=False, transposed=False, gather_output=True, **options):
    left, right, summand, _ = (each.npu() for each in _of_rank(dist.get_rank(), dtype))
    right = _transposed(right) if transposed else right
    options |= {"bias": summand} if bias else {}
    found, gathered = torch.ops.npu.npu_all_gather_base_mm(
        left, right, name_of_group(), dist.get_world_size(), gather_output=gather_output, **options
    )
    rows = torch.cat([_of_rank(rank, dtype)[0] for rank in range(dist.get_world_size())])
    assert torch.equal(gathered.cpu(), rows if gather_output else torch.empty(0, dtype=dtype))
    wanted = rows.double() @ right.cpu().double() + summand.cpu().double() * bias
    return _ratio(found, wanted, [], dtype)


def _reduce_scatter(dtype, *, bias=False, transposed=False, **options):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    left, right, summand, _ = (each.npu() for each in _of_rank(rank, dtype))
    right = _transposed(right) if transposed else right
    options |= {"bias": summand} if bias else {}
    found = torch.ops.npu.npu_mm_reduce_scatter_base(left, right, name_of_group(), ranks, **options)
    terms = [term.chunk(ranks)[rank] for term in _terms(dtype, bias)]
    return _ratio(found, sum(terms), terms, dtype)


CASES = {
    "all_reduce": (_all_reduce, {}),
    "all_reduce with a bias": (_all_reduce, {"bias": True}),
    "all_reduce with a summand": (_all_reduce, {"x3": True}),
    "all_reduce with all of them, of batches": (_all_reduce, {"bias": True, "x3": True, "batches": True}),
    "all_reduce with a transposed weight": (_all_reduce, {"transposed": True}),
    "all_gather": (_all_gather, {}),
    "all_gather without gather_output": (_all_gather, {"gather_output": False}),
    "all_gather with a bias": (_all_gather, {"bias": True}),
    "all_gather with a transposed weight": (_all_gather, {"transposed": True}),
    "all_gather by vector cores": (_all_gather, {"comm_mode": "aiv"}),
    "reduce_scatter": (_reduce_scatter, {}),
    "reduce_scatter with a bias": (_reduce_scatter, {"bias": True}),
    "reduce_scatter with a transposed weight": (_reduce_scatter, {"transposed": True}),
    "reduce_scatter by vector cores": (_reduce_scatter, {"comm_mode": "aiv"}),
}

if torch.__version__ >= (2, 12):  # older versions of torch_npu have no such argument
    CASES["all_reduce by vector cores"] = (_all_reduce, {"bias": True, "comm_mode": "aiv"})


def errors(device, dtype):
    """Return the error of each case, or the exception that it raised."""
    return testing.results_of(
        (name, lambda of=of, options=options: of(dtype, **options)) for name, (of, options) in CASES.items()
    )


def on_two_streams(device):
    """Return the errors of calls on two streams; each rank keeps a different one busy."""
    streams = [torch.npu.Stream(), torch.npu.Stream()]
    left, right = (each.npu() for each in _of_rank(dist.get_rank(), torch.float16)[:2])
    lefts = [left * (call + 1) for call in range(6)]
    # PyTorch's operators wait for their stream, CANN's do not.
    busy = torch.ones(2048, 4096, device=device, dtype=torch.float16)
    found = []
    torch.npu.synchronize()
    for call in range(6):
        with torch.npu.stream(streams[call % 2]):
            if call % 2 == dist.get_rank():
                torch.ops.npu.npu_swiglu(busy)
            found.append(torch.ops.npu.npu_mm_all_reduce_base(lefts[call], right, name_of_group()))
    torch.npu.synchronize()
    ratios = []
    for call, y in enumerate(found):
        scaled = [(_of_rank(rank, torch.float16)[0] * (call + 1)).double() for rank in range(dist.get_world_size())]
        terms = [x @ _of_rank(rank, torch.float16)[1].double() for rank, x in enumerate(scaled)]
        ratios.append(_ratio(y, sum(terms), terms, torch.float16))
    return ratios


def _half(*shape):
    return torch.ones(shape, dtype=torch.float16, device="npu")


def _wrong_world_size_in_gather():
    torch.ops.npu.npu_all_gather_base_mm(_half(4, INNER), _half(INNER, 3), name_of_group(), 4)


def _wrong_world_size_in_scatter():
    torch.ops.npu.npu_mm_reduce_scatter_base(_half(8, INNER), _half(INNER, 3), name_of_group(), 4)


def _captured():
    y = _half(4, INNER)
    with torch.npu.graph(torch.npu.NPUGraph()):
        torch.ops.npu.npu_mm_all_reduce_base(y, _half(INNER, 3), name_of_group())


def _phase_one(function, *arguments):
    # Imports libraries that only a process with an NPU can load.
    from tests._aclnn import phase_one

    status, message, _ = phase_one(function, *arguments)
    raise ValueError(f"{status}: {message}")


def _odd_rows():
    _phase_one(
        "aclnnMatmulReduceScatter", _half(7, INNER), _half(INNER, 3), None, name_of_group(), "sum", 0, 1, _half(3, 3)
    )


def _mm_all_reduce(x1, x2, group=None, **options):
    return lambda: torch.ops.npu.npu_mm_all_reduce_base(x1(), x2(), group or name_of_group(), **options)


REFUSED = {
    "unknown group": _mm_all_reduce(lambda: _half(4, 8), lambda: _half(8, 3), "nowhere"),
    "float32": _mm_all_reduce(lambda: _half(4, 8).float(), lambda: _half(8, 3).float()),
    "maximum": _mm_all_reduce(lambda: _half(4, 8), lambda: _half(8, 3), reduce_op="max"),
    "turns": _mm_all_reduce(lambda: _half(4, 8), lambda: _half(8, 3), comm_turn=2),
    "world_size of all_gather": _wrong_world_size_in_gather,
    "world_size of reduce_scatter": _wrong_world_size_in_scatter,
    "rows": _odd_rows,
    "few columns": lambda: torch.ops.npu.npu_all_gather_base_mm(_half(4, 8), _half(8, 3), name_of_group(), 2),
    "captured": _captured,
    "no group after a refusal": lambda: _phase_one(
        "aclnnMatmulAllReduce", _half(4, 8), _half(8, 3), None, "left", "sum", 0, 1, _half(4, 3)
    ),
}


def refusals(device):
    """Return the error of each refused call; after each, the ranks communicate."""
    dist.barrier()
    return testing.results_of((name, call) for name, call in REFUSED.items())


def after_its_group(device):
    """Return the error of a call that was valid while its group existed."""
    group = dist.new_group([0, 1], backend="hccl")
    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())

    def call():
        torch.ops.npu.npu_mm_all_reduce_base(_half(4, 8), _half(8, 3), name)
        torch.npu.synchronize()

    call()
    call()
    dist.destroy_process_group(group)
    return testing.results_of([("call", call)])["call"]


def _start():
    y = torch.ops.npu.npu_mm_all_reduce_base(_half(4, 8), _half(8, 2), name_of_group())
    torch.npu.synchronize()
    return y


def beside_a_plain_collective(device):
    """Call another function with the same number of elements on rank 1."""
    y = _start()
    if dist.get_rank() == 0:
        y = torch.ops.npu.npu_mm_all_reduce_base(_half(4, 8), _half(8, 2), name_of_group())
    else:
        dist.all_reduce(y)
    return y.tolist()


def of_other_rows(device):
    """Call with a different number of rows on each rank."""
    _start()
    return torch.ops.npu.npu_mm_reduce_scatter_base(
        _half(4 + 2 * dist.get_rank(), INNER), _half(INNER, 2), name_of_group(), 2
    ).tolist()


def beside_a_killed_rank(device):
    """Kill rank 1."""
    _start()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    y, _ = torch.ops.npu.npu_all_gather_base_mm(_half(4, INNER), _half(INNER, 2), name_of_group(), 2)
    return y.tolist()
