"""FusedEmaAdam(flatten=True): contiguous buffers for weights, gradients and states, transparent to other code."""

import copy
import io
import pickle

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import (
    RESUMED_OPTIONS,
    SETTINGS,
    Weights,
    assert_all_equal,
    assert_same,
    contents_of,
    each_dtype,
    step_with,
    train,
    trained,
)


def both(dtype=torch.float32, **options):
    """Return a flattened pair of model and optimizer before the first step, and a pair that is not flattened."""
    return [trained(dtype, 0, **options, flatten=flag) for flag in (True, False)]


OPTIONS = {
    "defaults": {},
    "L2 decay": {"decoupled_weight_decay": False, "weight_decay": 0.1},
    "no bias correction": {"bias_correction": False},
    "maximize": {"maximize": True},
    "no eps": {"eps": 0.0},
    "warm-up": {"ema_warmup": "ratio", "ema_start_step": 2},
    "every third step": {"ema_update_every": 3},
    "16-bit states": {"master_weights": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_dtype
def test_results_equal_those_without_flatten_bit_for_bit(dtype, options):
    flat, plain = both(dtype, **options)
    for pair in (flat, plain):
        train(*pair, range(8))
    assert_same(flat[1], plain[1])


@pytest.mark.parametrize("size", [1, 15, 17, 1000, 50_001, 600_000])
def test_sizes_that_torchs_kernels_split_differently_give_the_same_bits(size):
    results = []
    torch.set_num_threads(2)
    try:
        for flatten in (True, False):
            generator = torch.Generator().manual_seed(0)
            weights = [nn.Parameter(torch.randn(n, generator=generator)) for n in (48, size, 32, 7)]
            optimizer = FusedEmaAdam(weights, lr=1e-2, weight_decay=0.1, flatten=flatten)
            for _ in range(3):
                for weight in weights:
                    weight.grad = torch.randn(weight.shape, generator=generator)
                optimizer.step()
            results.append(contents_of(optimizer))
    finally:
        torch.set_num_threads(1)
    assert_all_equal(*results)


def test_weights_gradients_and_states_of_a_group_are_parts_of_one_buffer_each():
    weights = [nn.Parameter(torch.randn(128)) for _ in range(4)]
    optimizer = FusedEmaAdam(weights, flatten=True)
    step_with(optimizer)
    for of_kind in (
        [weight.data_ptr() for weight in weights],
        [weight.grad.data_ptr() for weight in weights],
        *([optimizer.state[weight][name].data_ptr() for weight in weights] for name in ("exp_avg", "ema_params")),
    ):
        assert [address - of_kind[0] for address in of_kind] == [0, 512, 1024, 1536]


def test_parameters_without_a_gradient_are_not_updated_and_count_no_steps():
    flat, plain = both()
    for step in range(12):
        for model, optimizer in (flat, plain):
            model.set_gradients(step)
            for i, weight in enumerate(model.parameters()):
                if (step + i) % 3 == 0 or (i == 3 and step < 6):
                    weight.grad = None
            optimizer.step()
        assert_same(flat[1], plain[1])


def test_an_assigned_gradient_is_copied_and_replaced_by_the_view():
    given = torch.ones(6)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedEmaAdam(weights, flatten=True)
    for weight, grad in zip(weights, given.split(3), strict=True):
        weight.grad = grad
    optimizer.step()
    views = [weight.grad for weight in weights]
    assert [view.tolist() for view in views] == [[1.0] * 3] * 2
    assert views[1].data_ptr() - views[0].data_ptr() == 512
    weights[1].grad = torch.full((3,), 2.0)
    optimizer.step()
    assert weights[0].grad is views[0] and weights[1].grad is views[1]
    assert views[1].tolist() == [2.0] * 3 and given.tolist() == [1.0] * 6


@pytest.mark.parametrize("first_step", [0, 1], ids=["one step count", "two step counts"])
@pytest.mark.parametrize("exchanged", ["gradients", "data of gradients", "data", "states"])
def test_parameters_of_a_buffer_may_exchange(exchanged, first_step):
    runs = []
    for flatten in (True, False):
        generator = torch.Generator().manual_seed(0)
        first, second = weights = [nn.Parameter(torch.randn(64, generator=generator)) for _ in range(2)]
        optimizer = FusedEmaAdam(weights, **SETTINGS, flatten=flatten)
        for step in range(5):
            for weight in weights:
                grad = torch.randn(64, generator=generator)
                weight.grad = weight.grad.copy_(grad) if step == 3 else grad
            if step < first_step:
                second.grad = None
            state = optimizer.state
            if step == 3 and exchanged == "gradients":
                first.grad, second.grad = second.grad, first.grad
            elif step == 3 and exchanged == "data of gradients":
                first.grad.data, second.grad.data = second.grad.data, first.grad.data
            elif step == 3 and exchanged == "data":
                first.data, second.data = second.data, first.data
            elif step == 3:
                state[first], state[second] = state[second], state[first]
            optimizer.step()
        runs.append(contents_of(optimizer))
    assert_all_equal(*runs)


def test_a_state_that_is_deleted_does_not_count_steps_of_others():
    emas = []
    for flatten in (True, False):
        first, second, third = (nn.Parameter(torch.full((16,), value)) for value in (1.0, 2.0, 3.0))
        options = {"ema_start_step": 5, "ema_without_grad": True, "flatten": flatten}
        optimizer = FusedEmaAdam([first, second, third], lr=0.1, **options)
        for step in range(8):
            first.grad, third.grad = (torch.ones(16) if step == 0 else None for _ in range(2))
            second.grad = torch.ones(16)
            optimizer.step()
        del optimizer.state[second]
        second.grad = None
        with torch.no_grad():
            third.mul_(2)
        first.grad = torch.ones(16)
        optimizer.step()
        emas.append([optimizer.state[third]["ema_params"].clone(), third.detach().clone()])
    assert_all_equal(*emas)


def test_parameters_that_share_a_gradient_have_views_of_their_own():
    flat, plain = both()
    for model, optimizer in (flat, plain):
        for _ in range(2):
            for weight in model.parameters():
                weight.grad = None
            shared = torch.ones(4, 3)
            same_shape = [weight for weight in model.parameters() if weight.shape == shared.shape]
            for weight in same_shape:
                weight.grad = shared
            optimizer.step()
    assert_same(flat[1], plain[1])
    grads = [weight.grad for weight in flat[0].parameters() if weight.grad is not None]
    assert grads and len({grad.data_ptr() for grad in grads}) == len(grads)


def test_a_tensor_over_the_memory_of_a_flattened_parameter_does_not_follow_it():
    weight = nn.Parameter(torch.ones(4))
    alias = weight.detach()
    optimizer = FusedEmaAdam([weight], flatten=True)
    for _ in range(2):
        step_with(optimizer)
    assert (weight < 1).all() and torch.equal(alias, torch.ones(4))


def test_a_load_leaves_the_parameters_where_they_are():
    weights = [nn.Parameter(torch.ones(16)) for _ in range(3)]
    optimizer = FusedEmaAdam(weights, **SETTINGS, flatten=True)
    step_with(optimizer)
    before, alias = [weight.data_ptr() for weight in weights], weights[1].detach()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_with(optimizer)
    assert [weight.data_ptr() for weight in weights] == before and torch.equal(alias, weights[1].detach())
    assert {int(optimizer.state[weight]["step"]) for weight in weights} == {2}


REPLACEMENTS = {
    "data": lambda grad: setattr(grad, "data", grad.data.clamp(-0.1, 0.1)),
    "set_": lambda grad: grad.set_(grad.clamp(-0.1, 0.1)),
    "transposed data": lambda grad: setattr(grad, "data", grad.data.t().clone().t() if grad.dim() == 2 else grad.data),
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
@pytest.mark.parametrize("keeps", ["zeroed", "accumulated", "new", "replaced after a step"])
@each_dtype
def test_a_gradient_whose_memory_was_replaced_is_used(dtype, keeps, replace):
    flat, plain = both(dtype)
    for model, optimizer in (flat, plain):
        for step in range(4):
            if keeps in ("zeroed", "new"):
                optimizer.zero_grad(set_to_none=keeps == "new")
            sum((weight * (step + i)).sum() for i, weight in enumerate(model.parameters())).backward()
            if keeps == "replaced after a step":
                optimizer.step()
            for weight in model.parameters():
                replace(weight.grad)
            if keeps != "replaced after a step":
                optimizer.step()
    assert_same(flat[1], plain[1])


@pytest.mark.parametrize("saved_flat", [True, False])
@pytest.mark.parametrize("loads_flat", [True, False])
@pytest.mark.parametrize("has_trained", [True, False])
@each_dtype
def test_training_resumes_from_a_file_flattened_or_not(dtype, has_trained, loads_flat, saved_flat):
    model, optimizer = trained(dtype, 5, **RESUMED_OPTIONS, flatten=saved_flat)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other = Weights(dtype, seed=1)
    other_optimizer = FusedEmaAdam(other.parameters(), flatten=loads_flat)
    if has_trained:
        train(other, other_optimizer, range(2))
    weights, state = torch.load(file)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    for pair in ((model, optimizer), (other, other_optimizer)):
        train(*pair, range(5, 10))
    assert_same(optimizer, other_optimizer)


def test_a_pickle_of_one_parameter_excludes_the_others():
    weights = [nn.Parameter(torch.randn(1000)) for _ in range(20)]
    optimizer = FusedEmaAdam(weights, flatten=True)
    step_with(optimizer)
    assert len(pickle.dumps(weights[3])) < 6_000
    assert len(pickle.dumps(optimizer)) < 20 * 5 * 6_000


def _move_data(model, optimizer):
    for weight in model.parameters():
        weight.data = weight.data.clone()


def _change_dtype(model, optimizer):
    model.to(torch.bfloat16)
    optimizer.zero_grad()


def _replace_a_state(model, optimizer):
    weight = next(model.parameters())
    optimizer.state[weight] = {name: value.clone() * 2 for name, value in optimizer.state[weight].items()}


def _step_compiled(model, optimizer):
    for weight in list(model.parameters())[2:]:
        weight.grad = None
    torch.compile(optimizer.step, fullgraph=True, backend="eager")()


def _add_group(model, optimizer):
    model.other = Weights(torch.float32, seed=1)
    optimizer.add_param_group({"params": model.other.parameters(), "lr": 0.1})


def _send_to_a_process(model, optimizer):
    """Move the memory of sent tensors, like a queue of torch.multiprocessing."""
    for tensor in model.state_dict().values():
        tensor.share_memory_()


CHANGES = (_move_data, _change_dtype, _replace_a_state, _send_to_a_process, _step_compiled, _add_group)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_changes_between_steps_is_noticed(change):
    flat, plain = both()
    for pair in (flat, plain):
        train(*pair, range(2))
        change(*pair)
        train(*pair, range(2, 5))
    assert_same(flat[1], plain[1])
    assert {state["ema_params"].dtype for state in flat[1].state.values()} == {torch.float32}


def test_a_parameter_that_is_a_view_of_another_tensor_is_not_flattened():
    storage = torch.zeros(2, 4)
    part = nn.Parameter(storage[0])
    step_with(FusedEmaAdam([part, nn.Parameter(torch.ones(3))], flatten=True))
    assert torch.equal(storage[0], part.detach()) and part.any()


@pytest.mark.parametrize("shares_first", [True, False])
@each_dtype
def test_a_parameter_in_shared_memory_stays_there(dtype, shares_first):
    weights = [nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2)]
    optimizer = FusedEmaAdam(weights, **SETTINGS, flatten=True)
    for is_first in (True, False):
        if is_first == shares_first:
            weights[0].share_memory_()
        place = weights[0].data_ptr()
        step_with(optimizer)
    assert weights[0].data_ptr() == place and weights[0].is_shared() and not weights[1].is_shared()
    assert torch.equal(*weights)
    with optimizer.swap_ema_params():
        assert weights[0].is_shared() and torch.equal(*weights)


def test_flatten_must_be_a_bool():
    with pytest.raises(TypeError, match="^FusedEmaAdam: flatten must be a bool, but it is 1$"):
        FusedEmaAdam(Weights().parameters(), flatten=1)
