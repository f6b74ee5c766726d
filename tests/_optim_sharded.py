"""Programs of test_optim_sharded.py in several processes: averages of a model in every flavour of FSDP."""

import contextlib
import inspect
import io
import warnings
from functools import partial
from types import SimpleNamespace

from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from host_npu.testing import results_of
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate

from tests import _optim
from tests._fsdp_models import FLAVOURS, INPUTS, OF_EACH_KIND, OFFLOADED_FSDP1, Process, fsdp2, new_model

OPTIONS = {"lr": 0.1, "ema_decay": 0.8}
# Dynamo of torch 2.9 cannot trace operators on shards of different sizes, and that of 2.14 cannot guard them.
COMPILES = (2, 12) <= torch.__version__ < (2, 14)


def error_of(expected, call, *arguments):
    """Return the message of a call that raises one of the expected errors."""
    try:
        call(*arguments)
    except expected as error:
        return str(error)
    return None


def trained(process, flavour):
    """Return a model after two steps, its optimizer, and a function that does another step."""
    model = FLAVOURS[flavour](process) if flavour else new_model()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS, flatten="flatten" in (flavour or ""))
    # Tensor-parallel processes have the same share of a batch.
    share = (process.rank // 2, process.world_size // 2) if flavour == "FSDP and TP" else None
    train = partial(process.train, model, optimizer, share=share)
    train(0)
    train(1)
    return model, optimizer, train


def evaluations(process, flavour=None):
    """Return the outputs of a model evaluated with its weights and with its averages, and trained in between."""
    return _evaluations(process, flavour, *trained(process, flavour))


def _evaluations(process, flavour, model, optimizer, train):
    has_graph = flavour != OFFLOADED_FSDP1
    found = {"weights": process.evaluated(model)}
    with optimizer.swap_ema_params(model):
        found["averages"] = process.evaluated(model)
        found["averages again"] = process.evaluated(model)
    train(2)
    with optimizer.swap_ema_params(model), torch.set_grad_enabled(has_graph):
        model(INPUTS.to(process.device))  # without a backward pass
        found["averages after a step"] = process.evaluated(model)
    found["weights after a step"] = process.evaluated(model)
    with torch.set_grad_enabled(has_graph):
        model(INPUTS.to(process.device))
    with optimizer.swap_ema_params(model):
        found["averages after a forward pass with a graph"] = process.evaluated(model)
    train(3)
    found["weights after the last step"] = process.evaluated(model)
    return found


def _layers(model):
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _broken_evaluation(process, model, optimizer):
    """Evaluate averages until it fails halfway."""
    layers = _layers(model)
    hook = layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError), optimizer.swap_ema_params(model):
        process.evaluated(model)
    hook.remove()


def _saved(process, flavour, folder, model, optimizer):
    """Return the averages file as read by this process."""
    path = f"{folder}/{process.device} {flavour}.pt"
    optimizer.save_ema_model(model, path)
    contents = torch.load(path, weights_only=True)
    is_tied = contents["2.weight"].data_ptr() == contents["4.weight"].data_ptr()
    return {"contents": contents, "is tied": is_tied}


def of_flavour(process, flavour, folder):
    """Return a model's successive outputs: evaluated, after a failed evaluation, and loaded with its averages."""
    model, optimizer, train = trained(process, flavour)
    found = {"evaluations": _evaluations(process, flavour, model, optimizer, train)}
    found["weights"] = process.evaluated(model)
    _broken_evaluation(process, model, optimizer)
    found["weights after a failure"] = process.evaluated(model)
    with optimizer.swap_ema_params(model):
        found["averages"] = process.evaluated(model)
    found |= _saved(process, flavour, folder, model, optimizer)
    model.load_state_dict(optimizer.ema_state_dict(model))
    found["loaded"] = process.evaluated(model)
    return found


def not_saved(process, flavour, folder):
    """Return the error of a file in a missing folder, and the state dict of the next call."""
    model, optimizer, _ = trained(process, flavour)
    error = error_of(OSError, optimizer.save_ema_model, model, f"{folder}/missing/ema.pt")
    contents = optimizer.ema_state_dict(model, full_state_dict=True)
    return error, contents, {str(value.device) for value in contents.values()}


def lacking_memory(process, flavour, folder):
    """Return the error if the first process cannot store what all have gathered."""
    model, optimizer, _ = trained(process, flavour)
    to = torch.Tensor.to

    def fail(tensor, *args, **options):
        if process.rank == 0 and args[:1] == (torch.device("cpu"),) and options == {"copy": True}:
            raise RuntimeError("not enough memory")
        return to(tensor, *args, **options)

    torch.Tensor.to = fail
    try:
        return (error_of(RuntimeError, optimizer.save_ema_model, model, f"{folder}/memory.pt"),)
    finally:
        torch.Tensor.to = to


def gather_in_flight(process):
    """Return outputs of averages and weights if a swap starts during an all-gather."""
    model, optimizer, _ = trained(process, "fully_shard")
    model.unshard(async_op=True)
    model[0].unshard(async_op=True)
    with optimizer.swap_ema_params():
        averages = process.evaluated(model)
        model[5].unshard(async_op=True)
    return {"averages": averages, "weights": process.evaluated(model)}


def swap_inside_a_forward_pass(process, flavour):
    """Return the error of a swap inside a forward pass, and the outputs before, of and after that pass."""
    model, optimizer, _ = trained(process, flavour)
    outputs, errors = [process.evaluated(model)], []

    def swap(*_):
        errors.append(error_of(RuntimeError, lambda: optimizer.swap_ema_params(model).__enter__()))

    hook = _layers(model)[1].register_forward_hook(swap)
    outputs.append(process.evaluated(model))
    hook.remove()
    return errors, [*outputs, process.evaluated(model)]


def without_the_model(process):
    """Return the errors of swaps of FSDP1 without the model, or with a part of it, and outputs before and after."""
    model, optimizer, _ = trained(process, "FSDP1")
    before = process.evaluated(model)
    swaps = (partial(optimizer.swap_ema_params, part) for part in (None, model.module[0]))
    errors = [error_of(RuntimeError, lambda swap=swap: swap().__enter__()) for swap in swaps]
    return errors, before, process.evaluated(model)


def scaled_steps(process, use_orig_params):
    """Return whether a step without an inf and one with it changed this process's weights, and the scales.

    The steps of ``fully_shard`` are tested in test_optimizer_matrix.py.
    """
    torch.manual_seed(0)
    # ShardedGradScaler of torch_npu 2.9 has no argument for the device.
    has_device = "device" in inspect.signature(ShardedGradScaler).parameters
    scaler = ShardedGradScaler(init_scale=4.0, **({"device": process.device} if has_device else {}))
    options = {"device_id": process.device_id(), "use_orig_params": use_orig_params}
    model = FullyShardedDataParallel(nn.Linear(4, 4, bias=False).to(process.device), **options)
    optimizer = FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.5)
    found = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        factors = torch.tensor([factor, 1.0, 1.0, 1.0], device=process.device)  # for the row in the first process
        scaler.scale((model(torch.ones(2, 4, device=process.device)) * factors).mean()).backward()
        before = [param.detach().clone() for param in model.parameters()]
        scaler.step(optimizer)
        is_changed = not all(map(torch.equal, before, model.parameters()))
        scaler.update()
        found.append((is_changed, scaler.get_scale()))
    return found


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compiled(process):
    """Return the output of a model after two compiled steps."""
    model = fsdp2(process)
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        process.train(model, SimpleNamespace(zero_grad=optimizer.zero_grad, step=step), seed)
    return process.evaluated(model)


def resumed_from_adamw(process, folder):
    """Return the output after a third step, resumed from a torch.distributed.checkpoint of torch's AdamW after two."""
    path, model = f"{folder}/{process.device}_adamw", fsdp2(process)
    adamw = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"])
    for seed in range(2):
        process.train(model, adamw, seed)
    weights, state = get_state_dict(model, adamw)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    model = fsdp2(process)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    weights, state = get_state_dict(model, optimizer)
    contents = {"model": weights, "optimizer": state}
    dcp.load(contents, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"])
    optimizer.reset_ema_params()
    process.train(model, optimizer, 2)
    return process.evaluated(model)


def state_of_the_first(process):
    """Return the error of loading the first process's state, whose shards are larger than the last one's."""
    _, optimizer, _ = trained(process, "fully_shard")
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    contents = [file.getvalue()]
    dist.broadcast_object_list(contents, src=0)
    before = [_local(one).clone() for state in optimizer.state.values() for one in state.values()]
    loaded = torch.load(io.BytesIO(contents[0]), weights_only=False)
    if (error := error_of(ValueError, optimizer.load_state_dict, loaded)) is None:
        return None
    after = [_local(one) for state in optimizer.state.values() for one in state.values()]
    return error, all(map(torch.equal, before, after))


def other_placements(process):
    """Return the errors of a state and of a function's gradient with other placements."""
    model, optimizer, _ = trained(process, "fully_shard")
    weight = model[0].weight
    replicated = optimizer.state[weight]["exp_avg"].redistribute(placements=[Replicate()])
    optimizer.state[weight]["exp_avg"] = replicated
    lists = [[weight.detach().clone()] for _ in range(5)]
    lists[1] = [replicated]
    steps = [torch.zeros((), dtype=torch.int64, device=process.device)]
    calls = optimizer.step, partial(fused_ema_adam, *lists, steps, **_optim.OPTIONS)
    return [error_of((RuntimeError, ValueError), call) for call in calls]


def results(device, folder, flavours, others):
    """Run the cases of these flavours, and others, as one of the processes."""
    process = Process(device, dist.get_rank(), dist.get_world_size())
    warnings.simplefilter("ignore")
    cases = {
        "gather in flight": partial(gather_in_flight, process),
        "without the model": partial(without_the_model, process),
        "state of the first": partial(state_of_the_first, process),
        "other placements": partial(other_placements, process),
    }
    if "compiled" in others and COMPILES:
        cases["compiled"] = partial(compiled, process)
    if "resumed from AdamW" in others:
        cases["resumed from AdamW"] = partial(resumed_from_adamw, process, folder)
    for name in flavours:
        cases[name] = partial(of_flavour, process, name, folder)
    for name in OF_EACH_KIND:
        cases[f"inside a forward pass: {name}"] = partial(swap_inside_a_forward_pass, process, name)
        cases[f"not saved: {name}"] = partial(not_saved, process, name, folder)
    for use_orig_params in (False, True):
        cases[f"scaled: {use_orig_params}"] = partial(scaled_steps, process, use_orig_params)
    cases["lacking memory"] = partial(lacking_memory, process, "fully_shard", folder)
    return results_of(cases.items())
