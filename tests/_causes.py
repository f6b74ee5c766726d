"""Why each message of the sources appears, and what helps.

A cause belongs to the messages that have its words, in files whose path begins with ``where``; of several causes the
one with the longest words. To add a message, give some of its words to a cause that is right for it, or write a new
cause, and run ``python -m tests.what_can_go_wrong``.
"""

from typing import NamedTuple

from tests._messages import Message


class Cause(NamedTuple):
    """What messages have in common."""

    words: tuple[str, ...]
    cause: str
    cure: str
    where: str = ""

    def fitting(self, message: Message) -> list[str]:
        """Return the words that a message has."""
        return [words for words in self.words if words in message.text and message.path.startswith(self.where)]


_INSTALLATION = (
    Cause(
        ("torch_aclnn_ops needs torch {oldest} to {newest}",),
        "The installed torch is older or newer than the releases that the package is tested with, and lacks what"
        " it uses.",
        "Install a torch of the range that the message names, and torch_npu of the same release.",
    ),
    Cause(
        (
            "must be 0, 1 or empty",
            "=1 asks for {what}",
            "{switch}=0",
            "pip sees what is installed",
        ),
        "A variable `TORCH_ACLNN_NPU`, `TORCH_ACLNN_HOST_NPU` or `TORCH_ACLNN_CPU` has another value, or asks for"
        " a part that needs torch or torch_npu at compile time. Without `--no-build-isolation` pip hides what is"
        " installed.",
        "Install torch (and torch_npu) first, then this package with `pip install --no-build-isolation`.",
    ),
    Cause(
        (
            "there is no C++ compiler",
            "{…} {stderr}",
            "needs the headers in",
            "has no sources in",
        ),
        "The host NPU is compiled at installation; there is no compiler, it refused the code, or sources or"
        " headers are missing.",
        "Install a g++ that knows C++20 (or set `CXX`), torch and torch_npu. In a checkout make sure that `csrc/`"
        " is complete.",
    ),
    Cause(
        (
            "it was compiled for",
            "does not say what it was compiled for",
            "has to be rebuilt",
            "it was not built",
        ),
        "A compiled part (`_C` for NPUs, `_cpu`, or the host NPU) is missing, or fits another release of torch or"
        " torch_npu than the installed one, as after an update of torch. Everything else works without it.",
        "`pip install --no-build-isolation --force-reinstall --no-deps` this package, after the torch that you want.",
    ),
    Cause(
        (
            "the installed torch is a CUDA build",
            "torch_aclnn_ops: {reason}.",
        ),
        "Some CUDA builds of torch and torch_npu cannot be in one process, so torch_npu is left out, with a warning.",
        "For NPUs install the CPU build of the same version of torch. Without NPUs nothing has to be done.",
    ),
    Cause(
        (
            "torch_npu is not installed",
            "torch_npu is installed, but CANN is not",
            "cannot open shared object file",
        ),
        "Tensors on NPUs need torch_npu and CANN. Without them the package works on the CPU.",
        "Install torch_npu of torch's version and CANN, and source CANN's `set_env.sh` before Python starts; or"
        " simulate an NPU: `python -m torch_aclnn_ops.host_npu PROGRAM`.",
    ),
    Cause(
        (
            "keeps torch_npu from being loaded",
            "torch was imported without torch_npu",
            "torch_npu is not imported",
            "it was not loaded yet",
            "the extension is not loaded",
        ),
        "torch_npu is not imported, so the extension for NPUs is not loaded either; the message ends in the reason.",
        "Import torch_npu, or torch_aclnn_ops before torch, and do not set `TORCH_DEVICE_BACKEND_AUTOLOAD=0`.",
    ),
    Cause(
        (
            "the CPU has no units for bfloat16",
            "oneDNN refuses them",
            "oneDNN's are not right",
        ),
        "Not an error: the doctor says why bfloat16 products of `linear_cross_entropy` are made in float32 on this"
        " CPU.",
        "Nothing has to be done; the results are right.",
    ),
)

_CALLS = (
    Cause(
        (
            "must have dtype",
            "must have a floating-point dtype",
            "must have input's shape and dtype",
        ),
        "A tensor has a dtype that the function does not take, or not that of the tensor it belongs to. It is not"
        " converted, because that would hide an error or cost memory.",
        "Convert it, `tensor.to(dtype)`, to the dtype that the message names.",
    ),
    Cause(
        (
            "dimensions, but its shape is",
            "must have shape {meaning}",
            "must broadcast to",
            "must broadcast together",
            "must have one row per index",
            "must have at least 1 dimension",
            "must have at least 1 row",
            "must have at least {…} bytes",
        ),
        "A tensor has another shape than the operator needs; in many cases a `view`, an `unsqueeze` or a"
        " transposition is missing.",
        "Compare the two shapes of the message: what is needed, and what was given.",
    ),
    Cause(
        ("Using a target size",),
        "A warning: input and target have different shapes, so the loss broadcasts them, and every element meets"
        " every other.",
        "Give both the same shape, for instance `target.view_as(input)`.",
    ),
    Cause(
        ("must be on {device}",),
        "The tensors of one call are on different devices.",
        "Move them, `tensor.to(device)`, to the device that the message names.",
    ),
    Cause(
        (
            "must be a Tensor, but it is None",
            "must be given when softmax is None",
            "{name}: {error}",
        ),
        "A raw operator was called without an argument that it needs, or with one that it does not have.",
        "Compare the call with the operator's schema in `torch_aclnn_ops/ops/`; None is taken for optional"
        " tensors only.",
    ),
    Cause(
        ("reduction must be 0 (none)",),
        "Raw operators take the reduction as CANN does, as a number; drop-ins take torch's words.",
        "Use 0, 1 or 2; or the drop-in of `torch_aclnn_ops.functional`.",
    ),
    Cause(
        (
            "there is no derivative with respect to it",
            "there is no derivative with respect to weight",
        ),
        "`weight` of `binary_cross_entropy` requires grad or has a tangent; neither CANN nor torch differentiates"
        " by it.",
        "`weight.detach()`, or multiply the unreduced loss by the weight.",
    ),
    Cause(
        (
            "num_weights must be at least 0",
            "indices must be from 0 to",
            "masked_target must be from 0 to",
            "target must not be from {end}",
            "vocab_start_index must be at least 0",
            "vocab_end_index must be at least",
        ),
        "An index, a class or a bound is outside of the table. On an NPU CANN would read or write other memory.",
        "Check the tokenizer's vocabulary against the table's rows, and padding such as -100. On NPUs the values"
        " of tensors are checked with `torch_aclnn_ops.check_values(True)` or `TORCH_ACLNN_CHECK_VALUES=1` only.",
    ),
    Cause(
        (
            "must not be an inference tensor",
            "must have a place in memory for each element",
            "must not share memory",
            "must not require grad or have a tangent",
            "must be batched by vmap",
        ),
        "The operator writes to this argument: another argument has the same memory, or an expanded tensor has one"
        " place for many elements, or the write would be hidden from autograd, `inference_mode` or `vmap`.",
        "Give tensors of their own memory (`clone()`), call under `torch.no_grad()`, and batch all arguments that"
        " are written to.",
    ),
    Cause(
        (
            "step must have at least 1 element",
            "weight_decay_mode must be 0 (L2)",
            "step must be at least 1 with bias_correction",
        ),
        "An option of the raw operator `apply_fused_ema_adam_` is wrong. With bias correction the first step is 1.",
        "Increment `step` before the call, use the values that the message names, or use `FusedEmaAdam`, which"
        " does it.",
    ),
)

_PATCH = (
    Cause(
        ("patch: {name} must be True or False", "only functions that are no generators are decorated"),
        "`patch` was called with something else than a switch, or as the decorator of a generator or a class.",
        "Give True or False (`adamw` takes a mapping of options too); inside a generator use `with patch():`.",
    ),
    Cause(
        ("after this patch began, which stays",),
        "A warning: another library, or a test, replaced the same function of torch while the patch was on, and has not"
        " taken it back, so the patch cannot either.",
        "End them in the opposite order of their beginnings.",
    ),
)

_LINEAR_CROSS_ENTROPY = (
    Cause(
        (
            "linear_cross_entropy: {name} must be {accepted",
            "linear_cross_entropy: {name} must {accepted}",
            "linear_cross_entropy: outputs must",
            "linear_cross_entropy: options must be None or",
            "linear_cross_entropy: token_weight must be a Tensor",
        ),
        "An argument has another type or value than the function takes.",
        'Use what the message says after "must"; the docstring of `linear_cross_entropy` has all arguments.',
    ),
    Cause(
        ("options must be None with a torch that has no LinearCrossEntropyOptions",),
        "`options` is torch's class, which came with torch 2.13.",
        "Give `chunk_size` or `max_memory` in its place.",
    ),
    Cause(
        (
            "linear_cross_entropy: input must have shape",
            "linear_cross_entropy: linear_weight must have shape (C, H) or (C, d_1, ..., d_K, H) with H",
            "linear_cross_entropy: linear_bias must have shape {…}, as linear_weight has without H",
            "token_weight must have the shape of class indices",
            "LinearCrossEntropyLoss: weight must have shape",
            "label_smoothing must be from 0 to 1",
        ),
        "The arguments do not fit each other: input is (N, H) or (B, T, H), linear_weight (C, H), linear_bias"
        " (C,), weight (C,), the target one class a row.",
        "Compare the shapes of the message; a head of `nn.Linear` is given as `head.weight`, not transposed.",
    ),
    Cause(
        (
            "token_weight must have a floating-point dtype",
            "token_weight must be on {device}",
        ),
        "`token_weight` is a mask of integers or bools, or on another device.",
        "`token_weight.to(input.device, torch.float32)`.",
    ),
    Cause(
        (
            "ignore_index must be None with probabilities",
            "outputs must not have {name} with probabilities",
        ),
        "The target is probabilities, so there is no class of a row to ignore or to name.",
        "Leave the argument out, or give class indices.",
    ),
    Cause(
        (
            "chunk_size and max_memory must not both be given",
            "max_memory must be at least",
        ),
        "Both say how many rows are computed at once; `max_memory` must hold at least one row of logits and the"
        " gradients' buffers.",
        "Give one of them; raise `max_memory` to the number of bytes that the message names.",
    ),
    Cause(
        ("must not be given with tensors of a class of their own",),
        "Tensor subclasses are left to torch's function, which does not have this argument.",
        "Give plain tensors (`tensor.as_subclass(torch.Tensor)`), or leave the argument out.",
    ),
    Cause(
        ("linear_cross_entropy: shift must",),
        "With `shift` each row is compared with a later label of its sequence, so the target is class indices of shape"
        " (..., length), and the shift is less than that length.",
        "Leave `shift` out where the labels are shifted already, as in a data set of next tokens.",
    ),
    Cause(
        (
            "LinearCrossEntropyLoss: target must not be None",
            "with token_weight and outputs",
            "in training; after eval()",
        ),
        "The module was called without a target, which gives logits, and is possible after `eval()` only.",
        "Give the target, or call `module.eval()` and leave out what belongs to a loss.",
    ),
    Cause(
        ("a compiled call must not be differentiated with create_graph=True",),
        "A second derivative was asked for through `torch.compile`, whose operators have a first one.",
        "Call the loss outside of the compiled function.",
    ),
    Cause(
        ("the tensors are on {type}",),
        "Not an error: `explain` says why CANN's fused operators are not used, because the tensors are not on an NPU.",
        "Nothing has to be done.",
    ),
    Cause(
        ("is out of bounds",),
        "A class is outside of the head and is not `ignore_index`. It is torch's own sentence.",
        "Check the vocabulary's size, and which number marks padding (`ignore_index`, -100 if not given).",
    ),
    Cause(
        ("linear_cross_entropy: ",),
        "A kernel for CPUs was called directly with tensors of another dtype or shape. `linear_cross_entropy`"
        " never does that.",
        "Call `torch_aclnn_ops.functional.linear_cross_entropy`.",
        where="csrc/cpu/",
    ),
)

_SHARDED = (
    Cause(
        (
            "process_group must be a group of this process",
            "process_group must be None or a torch.distributed",
            "process_group must be None, or the group of linear_weight's mesh",
        ),
        "`process_group` is not the group of the processes that share the vocabulary.",
        "Give a group of `torch.distributed` that has this process, and let only its processes make the call.",
    ),
    Cause(
        ("process_group must be None where torch.compile traces a transform",),
        "torch cannot differentiate collectives in a transform of `torch.func` that it compiles.",
        "Compile without the transform, or transform without compiling.",
    ),
    Cause(
        (
            "linear_cross_entropy: vocab_sizes must be {accepted}",
            "linear_cross_entropy: vocab_sizes must be None or {accepted}",
            "vocab_sizes must be None or {sizes}",
            "vocab_sizes must be None where process_group is",
            "vocab_sizes must be given under torch.compile",
            "vocab_sizes must have linear_weight's",
            "linear_weight must have a row on some rank",
            "linear_weight must be cut as torch.chunk cuts it",
        ),
        "`vocab_sizes` is the number of rows of linear_weight on each rank, the same list on every rank; here it"
        " is missing or does not fit the shards.",
        "Give `vocab_sizes=[rows of rank 0, rows of rank 1, ...]`; without `torch.compile` it can be left out.",
    ),
    Cause(
        (
            "linear_weight must be a Tensor of shape (rows of this rank, H)",
            "as linear_weight has on this rank",
            "must be strided floating-point tensors where process_group is given",
        ),
        "Where processes share the vocabulary, each gives its own rows of linear_weight and linear_bias, in plain"
        " dense tensors.",
        "Give this rank's shard, for a DTensor `to_local()`.",
    ),
    Cause(
        (
            "must be a plain tensor where linear_weight is one",
            "linear_weight must be a plain tensor, or a DTensor",
            "linear_bias must be a DTensor",
            "must have placements {accepted}",
        ),
        "Some arguments are DTensors and others are not, or their placements do not fit: linear_weight and"
        " linear_bias are `Shard(0)` on a mesh of one dimension, the others `Replicate()`.",
        "`redistribute` or `distribute_tensor` what the message names, or give plain tensors (`full_tensor()`).",
    ),
    Cause(
        (
            "linear_weight must be a plain tensor where input is one",
            "fsdp_module must be None or a torch.nn.Module",
            "linear_weight must be a parameter of fsdp_module",
            "but its shape is {shape}; FullyShardedDataParallel (FSDP1)",
            "fsdp_module must be a module that fully_shard has sharded",
        ),
        "The head's weight is a shard that FSDP made, and the call is outside of the forward pass of the module"
        " that it gathers.",
        "FSDP2: `linear_cross_entropy(..., fsdp_module=model)` with a weight that is read from the model for each"
        " call. FSDP1: call in the wrapped module's `forward`. Shards of a vocabulary need `process_group` instead.",
    ),
)

_OPTIMIZER = (
    Cause(
        ("unwrap: optimizer must be",),
        "`unwrap` looks in `optimizer` and `optim` of wrappers, and found no FusedEmaAdam.",
        "Give what accelerate or `ZeroRedundancyOptimizer` made of a FusedEmaAdam, or the optimizer itself.",
    ),
    Cause(
        (
            "FusedEmaAdam: {name} must be",
            "FusedEmaAdam: betas must be",
            "FusedEmaAdam: ema_decay must be",
            "FusedEmaAdam: ema_warmup must be",
            "FusedEmaAdam: flatten must be",
            "FusedEmaAdam: amsgrad must be",
        ),
        "An option of the optimizer, of one of its groups, or of a loaded group has another type or is out of range.",
        'Use what the message says after "must be"; the docstring of `FusedEmaAdam` has all options.',
    ),
    Cause(
        (
            "the gradient of parameter {j} of group {i}",
            "must be dense, but it is",
            "must have a real floating-point dtype",
            "must be {dtype} {shape} on {device}, as its parameter is",
            "fused_ema_adam: {name}[{i}] {reason}",
            "fused_ema_adam: {name} has {listed} tensors",
            "fused_ema_adam: steps[{i}] must be",
        ),
        "A gradient or a state does not fit its parameter: sparse, complex, or of another dtype, shape or device."
        " Nothing was updated.",
        "Use `sparse=False` in embeddings, keep complex and sparse parameters for another optimizer, and give"
        " lists of one length.",
    ),
    Cause(
        (
            "the step updated these parameters",
            "fused_ema_adam: updated parameters",
        ),
        "A note at another exception (before Python 3.11 a warning): the step failed in the middle, or was"
        " interrupted. The named parameters are updated with all their states; the others are as before.",
        "Remove the cause of the exception, then call `step()` again: it updates the others. A `backward()` in"
        " between would add to their gradients.",
    ),
    Cause(
        (
            "a second attempt to finish an update failed as well",
            "of these are half updated",
        ),
        "A device failed twice in one parameter's update. What is missing is kept.",
        "Remove the cause, then call `step()` again. If the device is gone, go on from the last checkpoint.",
    ),
    Cause(
        ("inside swap_ema_params() the parameters hold their averages",),
        "`step()`, `state_dict()` or another swap was called inside `with optimizer.swap_ema_params()`.",
        "Leave the block first. To save the averages inside it, take the state dict of the model.",
    ),
    Cause(
        (
            "a device does not give parameters",
            "all parameters have their weights back, but",
            "a device failed while the parameters got their weights back",
        ),
        "A device failed while weights and averages were exchanged. The message says what is where. No weight is"
        " lost; what the program wrote inside the block may be missing in the averages.",
        "Remove the cause. The next call of `step()`, `state_dict()` or `swap_ema_params()` writes back what is"
        " missing.",
    ),
)

_CHECKPOINTS = (
    Cause(
        ("the loaded state has no 'ema_params'",),
        "A warning: the checkpoint is of an optimizer without averages, such as `AdamW`, so the averages start"
        " from the weights.",
        "Load the model's weights before the optimizer's state, and nothing else has to be done.",
    ),
    Cause(
        ("has amsgrad=True",),
        "The checkpoint is of an Adam with `amsgrad`, which FusedEmaAdam does not have.",
        "Go on with torch's optimizer, or set `amsgrad` to False in the groups of the state dict, which loses the"
        " maxima.",
    ),
    Cause(
        ("must have the shape of its parameter",),
        "A loaded state belongs to another model, or the parameters come in another order.",
        "Build the model and the parameter groups as they were when the checkpoint was saved.",
    ),
    Cause(
        ("all parameters of a group must have done as many steps",),
        "MindSpeed keeps one step a group, and some parameters of the group had no gradient in some steps.",
        "Put such parameters in a group of their own before training, or keep this package's own state dict.",
    ),
)

_INTEGRATIONS = (
    Cause(
        ("integrations.lightning needs Lightning", "integrations.transformers needs transformers"),
        "The module serves a library that is not installed, or that is older than what it was tested with.",
        "Run the `pip install` of the message.",
    ),
    Cause(
        (
            "the model's head must be a torch.nn.Linear",
            "model must be a transformers.PreTrainedModel",
            "loss_function must be transformers' ForCausalLMLoss",
            "the forward of the model's head is replaced already",
        ),
        "`patch_model` takes causal language models of transformers, also with PEFT, whose head and loss are the usual"
        " ones and whose head no other library has changed.",
        "Call it right after `from_pretrained` or PEFT, before any wrapper. For a model with another loss leave"
        " `patch_model` out and call `linear_cross_entropy` yourself.",
    ),
    Cause(
        ("unpatch_model: another library has replaced",),
        "The head's forward is not the one of `patch_model` any more, so it cannot be given back.",
        "Take back what came later, such as accelerate's hooks, then call `unpatch_model`.",
    ),
    Cause(
        ("the head's weights are not whole", "fully_shard has sharded the head together"),
        "A patched model computes its loss after the head's forward pass, when its weights are sharded again.",
        "Shard with `fully_shard` (FSDP2), the head in a call of its own or with the whole model; else call"
        " `unpatch_model`.",
    ),
    Cause(
        ("the logits of this forward pass cannot be computed any more",),
        "The logits of a patched model are computed when they are first used, which was after a change of the weights.",
        "Use them before `optimizer.step()`, for instance with `logits = outputs.logits + 0`.",
    ),
    Cause(
        ("{…} has no attribute {name}",),
        "Something asked the logits of a patched model for a private attribute, which tensors have and these do not.",
        "Make a tensor of them, `logits + 0`, or call `unpatch_model`.",
    ),
    Cause(
        (
            "the trainer's optimizer must be a FusedEmaAdam",
            "configure_optimizers must return a FusedEmaAdam",
            "no other callback must swap the model's weights",
            "save_weights_only of ModelCheckpoint must be False",
            "load_best_model_at_end must be False",
        ),
        "`EmaCallback` needs the averages of `FusedEmaAdam`, and that nothing else exchanges the weights or loads the"
        " averages for them.",
        "Set what the message names, before training.",
    ),
    Cause(
        ("a validation begins inside another one",),
        "The model holds its averages already: validation, test or prediction was started inside another one.",
        "Let the first one end. After an exception that Lightning did not see, make a new trainer.",
    ),
)

_NPU = (
    Cause(
        (
            "drop-in functions and the CPU compute its formula",
            "CANN's operator is not supported on",
            "dimensions and CANN's operators take at most",
            "which CANN's operator does not take on",
            "and CANN's operator takes",
        ),
        "CANN's operator does not take these arguments, or this chip does not have it. A raw operator says so;"
        " drop-ins and modules compute the formula on the NPU, and `explain` shows the message as the reason.",
        "Call the drop-in in place of the raw operator, or change the dtype, the rank or the size that the message"
        " names.",
    ),
    Cause(
        (
            "CANN's libraries (libcust_opapi.so",
            "The other operators work",
            "CANN's libnnopbase.so has no",
        ),
        "The installed CANN is too old for the operator, or its package of operators for this chip is not installed.",
        "Install a newer CANN with the operators of your chip and source its `set_env.sh`. The doctor lists what"
        " is found.",
    ),
    Cause(
        (
            "phase one refused the call",
            "The call was {operator_name}",
        ),
        "CANN's operator returned an error. The message has its status, what that means, CANN's own words and all"
        " arguments of the call.",
        "Look for CANN's words on this page and in CANN's documents. In phase one nothing was computed, and the"
        " next call works.",
    ),
    Cause(
        (
            "a required pointer is null",
            "a parameter is invalid",
        ),
        "Status 161001 or 161002: CANN refuses an argument, most often its dtype, shape or format.",
        "CANN's words name it; the drop-in takes what CANN does not.",
    ),
    Cause(
        (
            "the runtime failed, or this device does not have the operator",
            "an inner error",
            "the executor could not be created",
            "the executor is not the one of phase one",
            "no documented status",
        ),
        "Status 361001, 561000, 561101, 561102 or unknown: CANN or the device failed, not the arguments.",
        "Look at `npu-smi info` and at CANN's log (`~/ascend/log`). If it happens again in a new process, report"
        " it with the message.",
    ),
    Cause(
        (
            "the output shapes could not be inferred",
            "the kernel cannot cut these shapes into tiles",
            "no kernel was found for these arguments",
            "a step inside the operator failed",
        ),
        "Status 561001, 561002, 561003 or 561103: there is no kernel for these dtypes, shapes or formats on this chip.",
        "Change them, or call the drop-in with `chunk_size` (`linear_cross_entropy`), which computes the formula.",
    ),
    Cause(
        (
            "the path of the operator packages is not set",
            "the kernel package is not installed",
        ),
        "Status 561107 or 561112: CANN does not find its kernels.",
        "Source CANN's `set_env.sh`, which sets `ASCEND_OPP_PATH`, and install CANN's kernel package for the chip.",
    ),
    Cause(
        ("torch_npu's task queue has ended",),
        "An earlier operator failed on torch_npu's queue, which ended it. Its exception was raised before, in the"
        " thread that asked first, or printed.",
        "Start the process again from the last checkpoint. To find the operator, set `ASCEND_LAUNCH_BLOCKING=1` or"
        " `TASK_QUEUE_ENABLE=0`. See [faults.md](faults.md).",
    ),
    Cause(
        ("is written in place, so it must not be in a private format",),
        "The tensor is in a format of the device such as FRACTAL_NZ, and the operator writes to it.",
        "`torch_npu.npu_format_cast_(tensor, 2)`; or `torch.npu.config.allow_internal_format = False` before"
        " tensors are made.",
    ),
    Cause(
        ("all tensors must be on {device}",),
        "The tensors of one call are on different devices.",
        "Move them, `tensor.to(device)`, to the first one's device.",
    ),
    Cause(
        (
            "CANN has no {dtype}",
            "a type that no operator takes",
            "aclCreateTensor made no tensor",
        ),
        "CANN cannot describe this tensor: its dtype is unknown to it, or the host is out of memory.",
        "Convert the tensor to a dtype that CANN has, such as float32.",
    ),
    Cause(
        ("the deterministic mode could not be set",),
        "`torch.use_deterministic_algorithms` could not be passed on to the device; the status is the runtime's.",
        "Look the status up in CANN's documents; without deterministic algorithms the call works.",
    ),
    Cause(
        (
            "weight_decay_mode or step is wrong",
            "{name}: grad_output must have at least 1 dimension",
            "the arguments do not fit each other",
            "logits and logits_max must have the same number of rows",
        ),
        "Shapes or options of a raw operator are wrong. The rules of all devices are then asked, and their more"
        " exact exception is raised in this one's place; so this one is seen only where those rules have a gap.",
        "Call the operator with the same arguments on the CPU, and report it.",
    ),
)

_HOST_NPU = (
    Cause(
        (
            "the host NPU is not enabled",
            "torch_npu is imported already",
            "the host NPU is enabled with",
        ),
        "The host NPU is chosen once in a process, before torch_npu is imported.",
        "`python -m torch_aclnn_ops.host_npu PROGRAM`, or `host_npu.enable(...)` as the program's first lines.",
    ),
    Cause(
        (
            "the host NPU needs torch_npu",
            "the host NPU was not built",
            "the host NPU cannot be loaded",
            "libopapi.so names the native kernel",
        ),
        "torch_npu is missing, or the host NPU was compiled for another torch_npu, or not at all; or the program was"
        " started in a checkout, whose package Python takes before the installed one, and only that one was compiled.",
        "Install torch_npu of torch's version, then this package again with `--no-build-isolation`, in a checkout with"
        " `--editable` too.",
    ),
    Cause(
        (
            "there is a real CANN",
            "ASCEND_HOME_PATH is set to",
            "its libraries are where the loader searches",
        ),
        "The machine has a real CANN, which the host NPU would hide.",
        "Use the real NPU; or `enable(force=True)`, `--force`, `TORCH_ACLNN_HOST_NPU_ENABLE=force`.",
    ),
    Cause(
        (
            "must be 0, 1 or force",
            "must be a whole number from 1 to",
            "must be one of {…}, got",
            "soc must be one of {…}, got",
            "strict_memory must be True or False",
            "must be 0 or 1, got",
            "TORCH_ACLNN_HOST_NPU_SOC must be one of",
            "{prog}: error: {error}",
        ),
        "A setting of the host NPU, an argument or an environment variable, is not accepted.",
        "Use what the message names.",
    ),
    Cause(
        ("there is no file {script}",),
        "The program to run does not exist in the working directory.",
        "Give its path, or `-m MODULE`.",
    ),
    Cause(
        (
            "nth must be at least 1",
            "status must not be 0",
        ),
        "`host_npu.fail` was asked for a failure that cannot be.",
        "`nth` counts from 1, and a status of 0 is success.",
    ),
    Cause(
        ("there is no device {device}",),
        "The program uses more devices than there are; the host NPU has one if it is not told otherwise.",
        "`python -m torch_aclnn_ops.host_npu --devices 2 PROGRAM`, or `enable(devices=2)`.",
    ),
    Cause(
        ("has not finished in time", "was not reached in time"),
        "A synchronisation with a time limit ended before the work did. The work goes on.",
        "Give it more time. If it never ends, an event is waited for that no stream records.",
    ),
    Cause(
        (
            "is out of memory",
            "the device addresses are used up",
            "the host is out of memory",
            "no memory for the message",
            "{call} failed: {…}",
        ),
        "The simulated device, or the host, has no more memory. Devices share the host's unless"
        " `TORCH_ACLNN_HOST_NPU_MEMORY` (MiB) says how much each has.",
        "Use smaller batches, `max_memory` of `linear_cross_entropy`, or a larger `TORCH_ACLNN_HOST_NPU_MEMORY`.",
    ),
    Cause(
        ("failed on stream",),
        "A kernel or a copy failed after its launch, so a later synchronisation reports it; the message ends in"
        " the reason.",
        "Look for the reason on this page; `ASCEND_LAUNCH_BLOCKING=1` raises it where it happens.",
    ),
    Cause(
        (
            "is not live device memory",
            "ends after {…} bytes",
            "is larger than any device memory",
            "touched device memory",
            "is outside the {rows} rows of the embedding",
            "is outside the {vocabulary} columns of the softmax",
            "there are more rows of logits than maxima",
            "the kernel needs a workspace",
            "the workspace was written to",
        ),
        "Memory outside of an allocation, freed, or of the other side was used: an index out of range, a tensor"
        " that was freed while a kernel used it, a host pointer to device memory. A real device may corrupt data"
        " without a word.",
        "Check indices with `torch_aclnn_ops.check_values(True)`; use `record_stream` where a tensor is used on"
        " another stream.",
    ),
    Cause(
        (
            "the host NPU does not simulate",
            "the host NPU has no graph operators",
            "the host NPU computes with infinities",
            "to pin it only, not to map it",
            "the host NPU has physical memory on devices only",
            "are simulated",
            "its output has another dtype",
            "has no NPU argument",
            "events between processes",
            "memory shared between processes",
            "device addresses of host memory",
            "dumping of operators",
            "overflow detection",
            "the abortion of running work",
        ),
        "The program uses a part of CANN that the host NPU does not have, such as graph operators, captured graphs,"
        " or rank tables and memory windows of HCCL.",
        "Leave it out of the run on the host NPU. What is simulated stands in"
        " [csrc/host_npu/README.md](../csrc/host_npu/README.md).",
    ),
    Cause(
        (
            "called {call}",
            "{…} where {…}",
            "which sends {sent} elements",
            "call {number} of communicator",
            "message {number} from rank",
            "{text}, to rank",
            "{text}, from rank",
            "({count} items)",
        ),
        "The ranks of a communicator did not make the same call: another function, number of elements, data type,"
        " reduction or root, or parts that do not fit together. A device would wait until the time-out, or corrupt"
        " data. Every rank gets this message, with both calls; calls count from 1, messages for each pair of ranks.",
        "Let all ranks make the same collectives in the same order. `TORCH_DISTRIBUTED_DEBUG=DETAIL` of torch names the"
        " line of the program that differs.",
    ),
    Cause(
        (
            "did not come within",
            "has destroyed the communicator",
            "the communicator {name} was destroyed",
            "in call {number}, {head}",
            "{rank} failed",
            "its stream had failed before",
            "to make sub-communicator",
            "to make communicator",
        ),
        "A rank waited for another one that died, ended, destroyed its communicator, failed, or did not make the call"
        " within HCCL_EXEC_TIMEOUT seconds (HCCL_CONNECT_TIMEOUT while the communicator is made). Every rank gets the"
        " same message; the communicator cannot be used again.",
        "Look for the first error of the rank that is named. If it is only slow, give it more time.",
    ),
    Cause(
        (
            "rootInfo is not from",
            "rootInfo is of another machine",
            "which made rootInfo, has ended",
            "rootInfo was used for a communicator already",
            "is taken: two callers",
            "gives nRanks",
            "must be a whole number of seconds",
            "getrandom failed",
        ),
        "The ranks did not find each other: the process of rank 0 had ended, `WORLD_SIZE` or `RANK` is not the same"
        " everywhere, an old store gave an old root info, or a time limit in the environment is not a number. The host"
        " NPU connects the processes of one machine and user.",
        "Start all ranks anew, on one machine, as `torchrun` does.",
    ),
    Cause(
        (
            "this chip has no {…} of {…} between ranks",
            "elements of this type cannot be reduced",
            "there is no such reduction",
        ),
        "HCCL does not reduce elements of this type, or not with this operation, on this chip: products of int16 and"
        " bfloat16, for instance.",
        "Reduce another type, and cast the result.",
    ),
    Cause(
        (
            "Expected all tensors to be on the same device",
            "device type for generator",
        ),
        "An operator of torch was called with tensors or a generator of different devices. They are torch's own"
        " sentences.",
        'Move everything to one device; `torch.Generator(device="npu")`.',
    ),
    Cause(
        ("",),
        "The simulated operator refuses its arguments as CANN's does, by the chip's tables. It stands behind \"CANN"
        " says\", or in an exception of torch_npu; names are those of CANN's C function.",
        "Change the dtype, the shape or the format that the message names, or call the drop-in, which computes the"
        " formula.",
        where="csrc/host_npu/opapi/",
    ),
    Cause(
        ("",),
        "An aclnn function was called with null pointers, or with tensors and executors that were destroyed or"
        " belong to another call. Python programs meet it only through an error of an extension in C++ that calls"
        " aclnn itself.",
        "Correct that extension; each executor serves one call, and its tensors live until phase two.",
        where="csrc/host_npu/nnopbase/",
    ),
    Cause(
        ("",),
        "A function of CANN's runtime was called in a way that it does not take: an argument out of range, a"
        " handle or memory that is not (or no longer) its own, a call too early. Python programs meet it through"
        " torch_npu, or an extension in C++.",
        "Look the function up in CANN's documents; the message begins with its name.",
        where="csrc/host_npu/ascendcl/",
    ),
    Cause(
        ("",),
        "A function of HCCL was called in a way that it does not take. Python programs meet it through torch_npu, or an"
        " extension in C++.",
        "Look the function up in CANN's documents; the message begins with its name.",
        where="csrc/host_npu/hccl/",
    ),
    Cause(
        (
            "aclSetCompileopt",
            "aclGetCompileopt",
            "the launch failed with status",
        ),
        "A function of CANN's operator compiler got a null pointer or too little room, or its copy could not be"
        " launched.",
        "Correct the call; after a failed launch look for the message before it.",
    ),
)

_PLAN = (
    Cause(
        ("plan: model must be", "give either --model or all of --hidden"),
        "The model has no shape yet: its name is unknown, or a number of its shape is missing or stands beside a name.",
        "Give one of the names, or hidden size, vocabulary and parameters: `Model(hidden, vocab, parameters)`.",
    ),
    Cause(
        ("plan: {name} must be a whole number", "plan: memory must be", "plan: dtype must be one of"),
        "A number is not what can be counted, or the operators do not take the dtype.",
        "Give what the message names; memory in GiB of one device.",
    ),
    Cause(
        ("plan: tensor_parallel must divide devices",),
        "The devices do not fall into groups of this size, or a device of a group would have no classes.",
        "Give a divisor of the number of devices.",
    ),
)

SECTIONS = {
    "Installing and importing": _INSTALLATION,
    "Calling a loss, an embedding or a raw operator": _CALLS,
    "Replacing torch's functions, patch": _PATCH,
    "linear_cross_entropy": _LINEAR_CROSS_ENTROPY,
    "Shared vocabularies, DTensor and FSDP": _SHARDED,
    "The optimizer": _OPTIMIZER,
    "Plans": _PLAN,
    "Checkpoints": _CHECKPOINTS,
    "transformers, PEFT and Lightning": _INTEGRATIONS,
    "NPU and queue": _NPU,
    "The host NPU": _HOST_NPU,
}
