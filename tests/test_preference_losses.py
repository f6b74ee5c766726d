"""Preference losses: the formulas of TRL's trainers, written in torch."""

import math
from functools import partial

from torch_aclnn_ops import functional as F

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, linear, logsigmoid, relu, sigmoid

PAIRS = 6


def draw(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def log_probs(number=4, *, largest=-0.05):
    """Return log-probabilities of sequences, each a leaf."""
    return [(largest - draw(PAIRS, seed=seed).abs()).requires_grad_() for seed in range(number)]


def dpo(chosen, rejected, reference_chosen, reference_rejected, beta, loss_type, label_smoothing):
    logits = (chosen - rejected) - (reference_chosen - reference_rejected)
    if loss_type == "sigmoid":
        of_wrong = -logsigmoid(-beta * logits) * label_smoothing
        return -logsigmoid(beta * logits) * (1 - label_smoothing) + of_wrong
    if loss_type == "hinge":
        return relu(1 - beta * logits)
    return (logits - 1 / (2 * beta)) ** 2


def dpo_of_type(chosen, rejected, reference_chosen, reference_rejected, beta, loss_type, wrong, tau=0.05):
    """The papers' formulas, with odds and logarithms of sigmoids instead of logsigmoids."""
    chosen, rejected = beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)
    p_chosen, p_rejected, p_pair = sigmoid(chosen), sigmoid(rejected), sigmoid(chosen - rejected)
    if loss_type == "robust":
        return (-(1 - wrong) * p_pair.log() + wrong * (1 - p_pair).log()) / (1 - 2 * wrong)
    if loss_type == "exo_pair":
        return p_pair * (p_pair / (1 - wrong)).log() + (1 - p_pair) * ((1 - p_pair) / wrong).log()
    if loss_type == "nca_pair":
        return -p_chosen.log() - 0.5 * (1 - p_chosen).log() - 0.5 * (1 - p_rejected).log()
    if loss_type == "bco_pair":
        return -p_chosen.log() - (1 - p_rejected).log()
    if loss_type == "sppo_hard":
        return ((chosen - 0.5) / beta) ** 2 + ((rejected + 0.5) / beta) ** 2
    if loss_type == "apo_zero":
        return 1 - p_chosen + p_rejected
    if loss_type == "apo_down":
        return p_chosen + 1 - p_pair
    mixed = sigmoid((chosen - rejected) / tau)
    return -p_pair.log() * (1 - mixed) + (rejected - chosen).exp() * mixed


def orpo(chosen, rejected, beta):
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -beta * logsigmoid(log_odds)


def simpo(chosen, rejected, beta, gamma, label_smoothing):
    logits = (chosen - rejected) - gamma / beta
    return -logsigmoid(beta * logits) * (1 - label_smoothing) - logsigmoid(-beta * logits) * label_smoothing


KINDS = [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0)]
TYPES = {
    **{("robust", wrong): {} for wrong in (0.0, 0.1)},
    ("exo_pair", 0.1): {},
    **{(kind, 0.0): {} for kind in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")},
    ("discopop", 0.0, "another tau"): {"discopop_tau": 0.4},
}
FORMULAS = {
    **{
        f"dpo, {key}": (
            partial(F.dpo_loss, beta=0.3, loss_type=key[0], label_smoothing=key[1], **options),
            lambda *given, key=key, options=options: dpo_of_type(*given, 0.3, *key[:2], *options.values()),
            4,
        )
        for key, options in TYPES.items()
    },
    **{
        f"{name}, {kind}, {smoothing}": (
            partial(function, beta=0.3, loss_type=kind, label_smoothing=smoothing),
            lambda *given, kind=kind, smoothing=smoothing: dpo(*given, *[0.0] * (4 - len(given)), 0.3, kind, smoothing),
            number,
        )
        for name, function, number in (("dpo", F.dpo_loss, 4), ("cpo", F.cpo_loss, 2))
        for kind, smoothing in KINDS
    },
    "orpo": (partial(F.orpo_loss, beta=0.2), lambda *given: orpo(*given, 0.2), 2),
    "simpo": (
        partial(F.simpo_loss, beta=2.5, gamma=1.4, label_smoothing=0.1),
        lambda *given: simpo(*given, 2.5, 1.4, 0.1),
        2,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_of_pairs_is_trls_formula_in_compiled_code_too(name):
    function, formula, number = FORMULAS[name]
    given, references = log_probs(2), [one.detach() for one in log_probs(number)[2:]]
    function, formula = (partial(_with, one, references) for one in (function, formula))
    expected = formula(*given)
    torch.testing.assert_close(function(*given, reduction="none"), expected)
    torch.testing.assert_close(function(*given, reduction="sum"), expected.sum())
    found = function(*given)
    torch.testing.assert_close(found, expected.mean())
    torch.testing.assert_close(torch.autograd.grad(found, given), torch.autograd.grad(expected.mean(), given))
    torch.autograd.grad(function(*given, reduction="none").mul_(2).sum(), given)  # in place, as torch's losses allow
    assert gradcheck(function, given) and gradgradcheck(function, given)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(*given), found)


def _with(function, references, *given, **options):
    """Call a function of the policy's log-probabilities and the reference's, which get no gradient."""
    return function(*given, *references, **options)


@pytest.mark.parametrize("kind", sorted({key[0] for key in TYPES}))
def test_a_loss_of_pairs_is_finite_for_certain_preferences(kind):
    chosen = torch.tensor([-1e4, 0.0, -400.0, -20.0], requires_grad=True)
    given = chosen, torch.tensor([0.0, -1e4, -20.0, -400.0])
    smoothing = 0.1 if kind == "exo_pair" else 0.0
    loss = F.dpo_loss(*given, *torch.zeros(2, 4), beta=1.0, loss_type=kind, label_smoothing=smoothing, reduction="none")
    assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), chosen)[0].isfinite().all()


def test_kto_is_trls_formula():
    policy, reference = log_probs(2)
    reference = reference.detach()
    kl_policy, kl_reference = draw(PAIRS, seed=8), draw(PAIRS, seed=9)
    is_desirable = torch.tensor([True, False, True, True, False, False])
    of_pairs = (kl_policy - kl_reference).mean()
    for kl, clamp_kl in ((of_pairs, True), (-of_pairs, True), (of_pairs, False), (-of_pairs, False)):
        baseline = kl.clamp(min=0) if clamp_kl else kl
        ratios = policy - reference
        chosen = 1 - sigmoid(0.3 * (ratios[is_desirable] - baseline))
        rejected = 1 - sigmoid(0.3 * (baseline - ratios[~is_desirable]))
        expected = torch.cat([1.5 * chosen, 0.5 * rejected]).mean()
        weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5, "clamp_kl": clamp_kl}
        found = F.kto_loss(policy, reference, is_desirable, kl, beta=0.3, **weights)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, policy), torch.autograd.grad(expected, policy))


def test_the_weights_of_kto_are_exact_and_a_divergence_may_have_any_shape_of_one_element():
    ratios, is_desirable = torch.tensor([0.5, -0.25], dtype=torch.float64), torch.tensor([True, False])
    weights = {"desirable_weight": 1.1, "undesirable_weight": 0.7, "reduction": "none", "beta": 1.0}
    found = F.kto_loss(ratios, torch.zeros_like(ratios), is_desirable, torch.zeros(1, 1), **weights)
    expected = torch.tensor([1.1, 0.7], dtype=torch.float64) * torch.sigmoid(torch.tensor([-0.5, -0.25]).double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("certain", [1.2e-7, 0.0, -1e-30])
def test_orpo_is_finite_where_a_sequence_is_certain(certain):
    values = torch.tensor([[certain, -0.5, certain], [-2.0, certain, certain]])
    chosen, rejected = (one.clone().requires_grad_() for one in values)
    loss = F.orpo_loss(chosen, rejected, beta=1.0, reduction="none")
    assert loss.isfinite().all() and loss[0] < 1e-6 < loss[1]
    for gradient in torch.autograd.grad(loss.sum(), (chosen, rejected)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("chosen", [-1e-5, -0.5, -1000.0])
def test_orpo_is_right_for_nearly_certain_and_for_impossible_sequences(chosen):
    given = [torch.full((4,), chosen).double(), torch.tensor([-1e-3, -0.7, -30.0, -500.0]).double()]
    torch.testing.assert_close(F.orpo_loss(*given, reduction="none"), orpo(*given, 0.1), rtol=1e-10, atol=1e-14)
    single = F.orpo_loss(*(one.float() for one in given), reduction="none")
    torch.testing.assert_close(single.double(), orpo(*given, 0.1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_computed_in_float32(dtype):
    given = [one.detach().to(dtype) for one in log_probs()]
    found = F.dpo_loss(*given)
    assert found.dtype == torch.float32 and found == F.dpo_loss(*(one.float() for one in given))


@pytest.mark.parametrize("name", ["dpo_loss", "orpo_loss", "simpo_loss", "kto_loss"])
def test_the_default_dtype_does_not_matter(name):
    log_probs = torch.tensor([-3.0, -5.0], dtype=torch.float32)
    given = [log_probs] * len(NAMES[name])
    more = {"is_desirable": log_probs > -4, "kl": 0.0} if name == "kto_loss" else {}
    expected = getattr(F, name)(*given, **more)
    torch.set_default_dtype(torch.float64)
    try:
        found = getattr(F, name)(*given, **more)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected)


def test_a_uint8_label_counts_in_the_average():
    target = torch.tensor([[156, 3]], dtype=torch.uint8)  # 156 is -100 in 8 bits
    assert F.sequence_log_probs(torch.tensor([[1.0, 2.0]]), target, average=True) == -1.5


@pytest.mark.parametrize("shift", [0, 1])
def test_log_probabilities_come_from_the_head_without_logits(shift):
    hidden, weight = draw(2, 7, 4, seed=1).requires_grad_(), draw(9, 4, seed=2).requires_grad_()
    target = torch.randint(9, (2, 7), generator=torch.Generator().manual_seed(0))
    target[:, :3] = -100
    rows, labels = (hidden[:, :-1], target[:, 1:]) if shift else (hidden, target)
    of_tokens = -cross_entropy(linear(rows, weight).movedim(-1, 1), labels, reduction="none")
    for average in (False, True):
        expected = of_tokens.sum(1) / ((labels != -100).sum(1) if average else 1)
        losses = F.linear_cross_entropy(hidden, weight, target, reduction="none", shift=shift)
        found = F.sequence_log_probs(losses, target, average=average, shift=shift)
        torch.testing.assert_close(found, expected)
        of_found, of_expected = (
            torch.autograd.grad(one.square().sum(), (hidden, weight), retain_graph=True) for one in (found, expected)
        )
        torch.testing.assert_close(of_found, of_expected)


def test_only_labels_that_are_not_ignored_count():
    losses, target = draw(2, 4).requires_grad_(), torch.tensor([[-100, 5, -100, 4], [1, 2, 3, -100]])
    for shift, counts in ((False, target != -100), (2, torch.tensor([[0, 0, 0, 1], [0, 0, 1, 0]]) == 1)):
        expected = torch.stack([-row[counted].sum() for row, counted in zip(losses, counts, strict=True)])
        torch.testing.assert_close(F.sequence_log_probs(losses, target, shift=shift), expected)
        averages = F.sequence_log_probs(losses, target, average=True, shift=shift)
        torch.testing.assert_close(averages, expected / counts.sum(1))
        assert torch.equal(torch.autograd.grad(averages.sum(), losses)[0] != 0, counts)


ONE, TOKEN, GRAD = torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, requires_grad=True)
NAMES = {
    "dpo_loss": ("chosen", "rejected", "reference_chosen", "reference_rejected"),
    **{name: ("chosen", "rejected") for name in ("cpo_loss", "simpo_loss", "orpo_loss")},
    "kto_loss": ("log_probs", "reference_log_probs"),
}
_kto = partial(F.kto_loss, ONE, ONE, ONE == 0)
_dpo = partial(F.dpo_loss, ONE, ONE, ONE, ONE)
_sums = partial(F.sequence_log_probs, TOKEN, TOKEN.long())
ERROR_INPUTS = [
    *[
        (partial(getattr(F, name), *[given] * len(names), **more), f"{names[0]} must have {accepted}")
        for name, names in NAMES.items()
        for given, accepted in (
            (torch.zeros(2, 1), r"shape \(B,\), but its shape is \[2, 1\]"),
            (ONE.long(), "a floating-point dtype, but it has torch.int64"),
        )
        for more in [{"is_desirable": given == 0, "kl": 0.0} if name == "kto_loss" else {}]
    ],
    *[
        (partial(getattr(F, name), *[ONE - 1] * len(names), **more, beta=0.0), "beta must be positive and finite, but")
        for name, names in NAMES.items()
        for more in [{"is_desirable": ONE == 0, "kl": 0.0} if name == "kto_loss" else {}]
    ],
    (partial(F.dpo_loss, ONE, ONE, GRAD, ONE), r"reference_chosen must not .* pass reference_chosen.detach\(\)"),
    (partial(F.dpo_loss, ONE, ONE, ONE, GRAD), "reference_rejected must not require grad, because a reference gets no"),
    (partial(F.kto_loss, ONE, GRAD, ONE == 0, 0.0), "reference_log_probs must not require grad, because a reference"),
    (partial(_kto, ONE), "kl must be a number or have one element, b"),
    (partial(_kto, math.nan), "kl must be finite, but it is nan"),
    (partial(_kto, True), "kl must be a number, but it is True"),
    (partial(_kto, 0.0, clamp_kl=1), "clamp_kl must be a bool, but it is 1"),
    (partial(_kto, 0.0, desirable_weight=-1.0), "desirable_weight must be at least 0 and finite, but it is -1.0"),
    (partial(_kto, 0.0, undesirable_weight=None), "undesirable_weight must be a number, but it is None"),
    (partial(F.kto_loss, ONE, ONE, ONE, 0.0), "is_desirable must have dtype torch.bool, but"),
    (partial(F.sequence_log_probs, ONE, ONE), r"losses must have shape \(B, T\), but its sha"),
    (partial(F.sequence_log_probs, TOKEN.long(), TOKEN.long()), "losses must have a floating-point dtype"),
    (partial(F.sequence_log_probs, TOKEN, ONE), r"target must have shape \[2, 3\], as losses has"),
    (partial(_sums, shift="x"), "shift must be a bool or an int, but it is 'x'"),
    (partial(_sums, shift=4), "shift must be at least 0 and at most the 3.* but it is 4"),
    (partial(F.dpo_loss, ONE, ONE, ONE, ONE[:1]), r"reference_rejected must have shape \[2\], as chosen has"),
    (partial(F.orpo_loss, ONE, 1.0), "rejected must be a Tensor, but it is 1.0"),
    (partial(F.orpo_loss, ONE + 0.5, ONE - 1), "chosen must be at most 0, but it has 0.5"),
    (partial(F.orpo_loss, ONE - 1, ONE + 0.5), "rejected must be at most 0, but it has 0.5"),
    (partial(_dpo, loss_type="kto"), "loss_type must be one of 'sigmoid'"),
    (partial(F.cpo_loss, ONE, ONE, loss_type="apo_zero"), "loss_type must be one of 'sigmoid', 'hinge', 'ipo', but"),
    (partial(F.cpo_loss, ONE, ONE, label_smoothing=None), "label_smoothing must be a number, but it is None"),
    (partial(_dpo, label_smoothing=0.5), "label_smoothing must be at least 0 and below"),
    (partial(_dpo, loss_type="ipo", label_smoothing=0.1), "label_smoothing must be at least 0 and below"),
    (partial(_dpo, loss_type="exo_pair"), "label_smoothing must be above 0 and below 0.5 with loss_type 'exo_pair'"),
    (partial(_dpo, discopop_tau=0.1), "discopop_tau must be 0.05, the default, with loss_type 'sigmoid', but it is"),
    (partial(_dpo, loss_type="discopop", discopop_tau=0.0), "discopop_tau must be positive and finite, but it is 0.0"),
    (partial(F.simpo_loss, ONE, ONE, gamma=math.inf), "gamma must be finite, but it is inf"),
    (partial(F.simpo_loss, ONE, ONE, reduction="avg"), "reduction must be one of 'none', 'mean', 'sum'"),
]


@pytest.mark.parametrize(("call", "message"), ERROR_INPUTS, ids=[message for _, message in ERROR_INPUTS])
def test_invalid_arguments_raise_a_clear_error(call, message):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"^\\w+: {message}"):
        call()


def test_a_reference_that_requires_grad_is_accepted_where_no_gradients_are_recorded():
    with torch.no_grad():
        assert F.dpo_loss(ONE, ONE, GRAD, GRAD) == F.dpo_loss(*[ONE] * 4)
