"""Experts distributed over two ranks, for test_distributed_experts.py."""

import torch
import torch.distributed as dist
from host_npu import testing
from torch import Tensor

RANKS, EXPERTS, CHOICES = 2, 4, 3
ON_EACH = EXPERTS // RANKS


def name_of_group() -> str:
    """Return the name of the communicator of all ranks."""
    return dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())


class Batch:
    """The tokens of a rank, which all ranks can compute, and their experts."""

    def __init__(self, rank: int, tokens: int, size: int, dtype: torch.dtype, inactive: str = "") -> None:
        generator = torch.Generator().manual_seed(rank)
        self.tokens = torch.randn(tokens, size, generator=generator).to(dtype)
        self.ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :CHOICES].int()
        self.weights = torch.rand(tokens, CHOICES, generator=generator)
        self.shared = torch.randn(tokens, size, generator=generator).to(dtype)
        self.active = torch.ones(tokens, CHOICES, dtype=torch.bool)
        if inactive == "tokens":
            self.active[tokens - 2 :] = False
        elif inactive == "copies":
            self.active = torch.rand(tokens, CHOICES, generator=generator) < 0.6
            self.active[0] = False
        self.mask = {"": None, "tokens": self.active[:, 0], "copies": self.active}[inactive]

    def combined(self, shared: bool) -> Tensor:
        """Return combine's result in float64 if each expert multiplies by its number plus 1; nan where inactive."""
        factors = (self.ids + 1) * self.weights.double() * self.active
        result = factors.sum(1, True) * self.tokens.double() + self.shared.double() * shared
        return result.masked_fill(~self.active.any(1, True), torch.nan)


def received(batches: list[Batch], expert: int) -> tuple[Tensor, Tensor]:
    """Return the rows that an expert receives and their weights, ordered by rank and token."""
    found = [((batch.ids == expert) & batch.active).nonzero(as_tuple=True) for batch in batches]
    rows = [batch.tokens[token] for batch, (token, _) in zip(batches, found, strict=True)]
    return torch.cat(rows), torch.cat([batch.weights[at] for batch, at in zip(batches, found, strict=True)])


def _npu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.npu()


def _options() -> tuple[str, int, int, int]:
    return name_of_group(), RANKS, dist.get_rank(), EXPERTS


def through_the_experts(
    version: str,
    *,
    dtype: torch.dtype = torch.float16,
    size: int = 64,
    tokens: tuple[int, int] = (6, 6),
    inactive: str = "",
    cumulative: bool = False,
    quantized: str = "",
    shared: bool = False,
    weights_go_along: bool = False,
) -> float:
    """Check dispatch, and return the largest error of combine, where 1 is explained by rounding."""
    rank = dist.get_rank()
    batches = [Batch(each, tokens[each], size, dtype, inactive) for each in range(RANKS)]
    own, all_tokens = batches[rank], max(tokens) * RANKS if tokens[0] != tokens[1] else 0
    smooth = torch.rand(EXPERTS, size, generator=torch.Generator().manual_seed(9)) + 0.5
    rows, scales, numbers, counts, ends, _, weights = getattr(torch.ops.npu, f"npu_moe_distribute_dispatch{version}")(
        own.tokens.npu(),
        own.ids.npu(),
        *_options(),
        scales=smooth.npu() if quantized == "smooth" else None,
        x_active_mask=_npu(own.mask),
        expert_scales=own.weights.npu() if weights_go_along else None,
        shared_expert_num=0,
        quant_mode=2 if quantized else 0,
        global_bs=all_tokens,
        expert_token_nums_type=0 if cumulative else 1,
    )
    experts = range(rank * ON_EACH, (rank + 1) * ON_EACH)
    expected = [received(batches, expert) for expert in experts]
    found = counts.cpu()
    sizes = torch.tensor([len(each) for each, _ in expected])
    assert torch.equal(found, sizes.cumsum(0) if cumulative else sizes)
    total = int(sizes.sum())
    if quantized:
        wide = [
            rows.double() * (smooth[e] if quantized == "smooth" else 1)
            for e, (rows, _) in zip(experts, expected, strict=True)
        ]
        scale = torch.cat(wide).abs().amax(1) / 127
        torch.testing.assert_close(scales[:total].cpu().double(), scale, rtol=1e-6, atol=0)
        assert (rows[:total].cpu() - torch.cat(wide) / scale[:, None]).abs().max() < 0.501
        return 0.0
    assert torch.equal(rows[:total].cpu(), torch.cat([each for each, _ in expected]))
    if weights_go_along:
        assert torch.equal(weights[:total].cpu(), torch.cat([each for _, each in expected]))
    factors = torch.arange(rank * ON_EACH + 1, (rank + 1) * ON_EACH + 1).repeat_interleave(sizes)
    rows[:total] *= factors[:, None].npu()
    options = {"shared_expert_x": own.shared.npu()} if shared else {}
    result = getattr(torch.ops.npu, f"npu_moe_distribute_combine{version}")(
        rows, own.ids.npu(), numbers, ends, own.weights.npu(), *_options(),
        x_active_mask=_npu(own.mask), shared_expert_num=0, global_bs=all_tokens, **options,
    )  # fmt: skip
    wanted, kept = own.combined(shared), own.active.any(1)
    assert result.dtype == dtype and result.shape == wanted.shape
    # Each row is rounded twice: by the experts, and at the end.
    bound = torch.finfo(dtype).eps * (8 * own.tokens.double().abs() + wanted.abs())[kept] + 1e-6
    return ((result.cpu().double() - wanted)[kept].abs() / bound).max().item()


CASES = {
    "v1": ("", {}),
    "v1 of bfloat16": ("", {"dtype": torch.bfloat16}),
    "v1 with sums of tokens": ("", {"cumulative": True}),
    "v1 in int8": ("", {"quantized": "plain"}),
    "v2": ("_v2", {}),
    "v2 of bfloat16, with other batches": ("_v2", {"dtype": torch.bfloat16, "tokens": (3, 7)}),
    "v2 with inactive tokens": ("_v2", {"inactive": "tokens"}),
    "v2 with the weights": ("_v2", {"weights_go_along": True}),
    "v2 in int8, smooth": ("_v2", {"quantized": "smooth"}),
}
ON_A3 = {
    "v2": ("_v2", {"size": 1024}),
    "v2 with inactive copies": ("_v2", {"size": 1024, "inactive": "copies"}),
    "v2 with a shared expert": ("_v2", {"size": 1024, "shared": True, "dtype": torch.bfloat16}),
}


def errors(device: str, cases: dict = CASES) -> dict[str, object]:
    """Return the error of each case, or the exception that it raised."""
    return testing.results_of(
        (name, lambda of=of, options=options: through_the_experts(of, **options))
        for name, (of, options) in cases.items()
    )


class Plan:
    """The number of tokens that each rank has for each expert of all ranks, and the experts' matrices."""

    def __init__(self, dtype: torch.dtype = torch.float16, transposed: bool = False, shared: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.counts = torch.randint(4, (RANKS, EXPERTS), generator=generator)
        self.counts[0, 1] = 0
        self.tokens = [torch.randn(int(rows.sum()), 8, generator=generator).to(dtype) for rows in self.counts]
        self.matrices = torch.randn(EXPERTS, 8, 16, generator=generator).to(dtype)
        self.transposed, self.shared = transposed, shared
        self.own = torch.randn(2, 5, 8, generator=generator).to(dtype)

    def blocks(self, source: int) -> list[Tensor]:
        """Return a rank's tokens for each expert."""
        return list(self.tokens[source].split(self.counts[source].tolist()))

    def options(self, sent: Tensor, received: Tensor) -> dict[str, object]:
        """Return a rank's arguments that both functions take."""
        matrix = self.own[1, :3].t()
        return {
            "hcom": name_of_group(), "ep_world_size": RANKS, "send_counts": sent.tolist(),
            "recv_counts": received.flatten().tolist(), "trans_gmm_weight": self.transposed,
            "trans_mm_weight": self.transposed, "mm_x": self.own[0].npu() if self.shared else None,
            "mm_weight": _npu(self._given(matrix)) if self.shared else None,
        }  # fmt: skip

    def _given(self, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous() if self.transposed else matrix.contiguous()

    def weight(self, own: slice) -> Tensor:
        """Return the matrices of a rank's experts on the device."""
        return self._given(self.matrices[own]).npu()

    def check(self, found: Tensor, expected: Tensor, shared: Tensor | None) -> float:
        """Return the largest error of the products, relative to rounding."""
        pairs = [(found, expected)]
        if self.shared:
            pairs.append((shared, self.own[0].double() @ self.own[1, :3].t().double()))
        eps = torch.finfo(found.dtype).eps
        return max(((a.cpu().double() - b).abs() / (eps * (b.abs() + 1))).max().item() for a, b in pairs)


def to_experts_and_back(back: bool, **options) -> float:
    """Return the largest error, where 1 is explained by rounding, of products with an exchange of tokens."""
    plan, rank = Plan(**options), dist.get_rank()
    own = slice(rank * ON_EACH, (rank + 1) * ON_EACH)
    sent, received = plan.counts[rank], plan.counts[:, own]
    # The tokens of this rank's experts, for each expert in the order of the source ranks.
    tokens = torch.cat([plan.blocks(source)[expert] for expert in range(EXPERTS)[own] for source in range(RANKS)])
    matrices = plan.matrices.double()
    if back:
        # The products are sent back; the rank receives them in the order of its tokens.
        y, shared = torch.ops.npu.npu_gmm_alltoallv(
            tokens.npu(), plan.weight(own), **plan.options(received.flatten(), sent)
        )
        expected = [block.double() @ matrix for block, matrix in zip(plan.blocks(rank), matrices, strict=True)]
        return plan.check(y, torch.cat(expected), shared)
    y, shared, permuted = torch.ops.npu.npu_alltoallv_gmm(
        plan.tokens[rank].npu(), plan.weight(own), permute_out_flag=True, **plan.options(sent, received)
    )
    assert torch.equal(permuted.cpu(), tokens)
    sizes = received.sum(0).tolist()
    expected = [part.double() @ matrix for part, matrix in zip(tokens.split(sizes), matrices[own], strict=True)]
    return plan.check(y, torch.cat(expected), shared)


EXCHANGES = {
    "tokens": (False, {}),
    "tokens of bfloat16, with a shared expert": (False, {"dtype": torch.bfloat16, "shared": True}),
    "tokens, transposed": (False, {"transposed": True, "shared": True}),
    "products": (True, {}),
    "products of bfloat16, with a shared expert": (True, {"dtype": torch.bfloat16, "shared": True}),
    "products, transposed": (True, {"transposed": True, "shared": True}),
}


def exchange_errors(device: str) -> dict[str, object]:
    """Return the error of each exchange of tokens with products, or the exception that it raised."""
    return testing.results_of(
        (name, lambda back=back, options=options: to_experts_and_back(back, **options))
        for name, (back, options) in EXCHANGES.items()
    )


def _exchange(counts: Tensor) -> None:
    plan = Plan()
    torch.ops.npu.npu_alltoallv_gmm(plan.tokens[0].npu(), plan.weight(slice(0, 2)), **plan.options(counts, counts))


REFUSED_EXCHANGES = {
    "numbers": lambda: _exchange(torch.ones(3, dtype=torch.long)),
    "sum": lambda: _exchange(torch.ones(4, dtype=torch.long) * 9),
}


def exchange_refusals(device: str) -> dict[str, object]:
    """Return the error of each refused exchange; after each, the ranks communicate."""
    dist.barrier()
    return testing.results_of(REFUSED_EXCHANGES.items())


def other_counts(device: str) -> None:
    """Expect other counts of tokens than the other rank sends."""
    plan = Plan()
    sent = plan.counts[dist.get_rank()]
    torch.ops.npu.npu_alltoallv_gmm(
        plan.tokens[dist.get_rank()].npu(), plan.weight(slice(0, 2)), **plan.options(sent, torch.full((4,), 3))
    )
    torch.npu.synchronize()


def _dispatch(size: int = 64, experts: int = EXPERTS, ranks: int = RANKS, rank: int | None = None, **options) -> None:
    batch = Batch(0, 6, size, torch.float16)
    ids = options.pop("ids", batch.ids)
    mask = options.pop("mask", None)
    rank = dist.get_rank() if rank is None else rank
    torch.ops.npu.npu_moe_distribute_dispatch_v2(
        batch.tokens.npu(), ids.npu(), name_of_group(), ranks, rank, experts,
        x_active_mask=_npu(mask), **{"shared_expert_num": 0} | options,
    )  # fmt: skip
    torch.npu.synchronize()


REFUSED = {
    "world size": lambda: _dispatch(ranks=4),
    "rank": lambda: _dispatch(rank=1 - dist.get_rank()),
    "experts": lambda: _dispatch(experts=5),
    "quantization": lambda: _dispatch(quant_mode=1),
    "ranks of shared experts": lambda: _dispatch(shared_expert_num=1, shared_expert_rank_num=1),
    "algorithm": lambda: _dispatch(comm_alg="hierarchy"),
    "size": lambda: _dispatch(size=48),
    "batch": lambda: _dispatch(global_bs=8),
    "mask of copies": lambda: _dispatch(mask=torch.ones(6, CHOICES, dtype=torch.bool)),
    "experts that copy": lambda: _dispatch(copy_expert_num=1),
}


def refusals(device: str) -> dict[str, object]:
    """Return the error of each refused call; after each, the ranks communicate."""
    dist.barrier()
    return testing.results_of(REFUSED.items())


def alone(device: str) -> dict[str, object]:
    """Return the error of the only rank of a communicator."""
    return testing.results_of([("alone", lambda: _dispatch(ranks=1))])


def out_of_range(device: str) -> None:
    """Send tokens to an expert that does not exist."""
    _dispatch(ids=torch.full((6, CHOICES), EXPERTS, dtype=torch.int32))


def behind_an_inactive_one(device: str) -> None:
    """Call with an active token after an inactive one."""
    _dispatch(mask=torch.tensor([True, False, True, True, True, True]))
