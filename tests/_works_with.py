"""The tests behind the ticks of docs/works_with.md.

By row and column of its first table: file and name, without ``test_``. Those of ``_contract`` run for every loss, the
embedding and ``linear_cross_entropy``.
"""

TESTS = {
    "eager training": {
        "losses, embedding": ["_contract result_and_gradients_equal_torchs"],
        "`linear_cross_entropy`": ["_contract result_and_gradients_equal_torchs"],
        "`FusedEmaAdam`": ["test_optim 200_steps_equal_torchs_and_the_average_equals_swa_utils"],
        "host NPU": [
            "npu/test_drop_ins result_and_gradients_are_the_cpus",
            "npu/test_optimizer 20_steps_give_the_cpus_weights_and_averages",
        ],
    },
    "second derivatives": {
        "losses, embedding": ["_contract second_derivatives_are_right"],
        "`linear_cross_entropy`": ["_contract hessian_equals_torchs"],
        "host NPU": ["npu/test_derivatives gradients_are_the_cpus"],
    },
    "`torch.func`: vmap, jvp": {
        "losses, embedding": ["_contract vmap_of_the_gradient_equals_a_loop"],
        "`linear_cross_entropy`": ["_contract forward_mode_of_forward_mode_equals_torchs"],
        "host NPU": ["npu/test_derivatives a_transform_reaches_the_kernel_below_it"],
    },
    "`torch.compile`, fullgraph": {
        "losses, embedding": ["_contract compiles_without_a_graph_break"],
        "`linear_cross_entropy`": ["_contract compiles_without_a_graph_break"],
        "`FusedEmaAdam`": ["test_optim_options a_compiled_step_with_a_scheduler_is_compiled_twice_at_most"],
        "host NPU": ["npu/test_derivatives it_compiles_without_a_graph_break"],
    },
    "`make_fx`, `torch.export`": {
        "losses, embedding": ["_contract make_fx_traces_it"],
        "`linear_cross_entropy`": ["test_linear_cross_entropy_kernels export_supports_a_dynamic_number_of_rows"],
    },
    "`torch.jit.trace`": {
        "`linear_cross_entropy`": ["test_torchscript a_trace_computes_the_same_for_any_number_of_rows"],
    },
    "autocast": {
        "losses, embedding": ["_contract autocast_gives_torchs_dtypes_and_values"],
        "`linear_cross_entropy`": ["_contract autocast_gives_torchs_dtypes_and_values"],
    },
    "`GradScaler`": {
        "`linear_cross_entropy`": [
            "test_linear_cross_entropy_kernels a_gradient_scaler_keeps_float16_gradients_from_underflow"
        ],
        "`FusedEmaAdam`": ["test_optim_mixed_precision with_a_grad_scaler_a_step_is_unscaled_or_skipped"],
        "host NPU": ["npu/test_optimizer a_grad_scaler_skips_a_step"],
    },
    "saved-tensor hooks, activation checkpointing": {
        "losses, embedding": ["_contract saved_tensor_hooks_apply_to_forward_and_every_backward"],
        "`linear_cross_entropy`": ["test_linear_cross_entropy_kernels a_checkpointed_loss_has_the_same_gradients"],
    },
    "checkpoints": {
        "`FusedEmaAdam`": ["test_optim_checkpoints training_resumes_bit_for_bit_after"],
        "host NPU": ["npu/test_optimizer a_checkpoint_of_the_npu_resumes_on_the_cpu"],
    },
    "learning-rate schedulers": {
        "`FusedEmaAdam`": ["test_optim a_scheduler_works_as_with_adamw"],
        "host NPU": ["npu/test_optimizer a_tensor_learning_rate_on_the_device_equals_the_number"],
    },
    "head sharded by `fully_shard`": {
        "`linear_cross_entropy`": ["test_sharded_heads loss_and_gradients_equal_one_process_with_the_full_batch"],
        "`FusedEmaAdam`": ["test_examples shards_of_two_processes_learn_and_their_averages_are_swapped_in_and_out"],
        "host NPU": ["test_sharded_heads loss_and_gradients_equal_one_process_with_the_full_batch"],
    },
    "DDP, `fully_shard`, ZeRO, DCP": {
        "`linear_cross_entropy`": ["test_transformers_wrapped several_processes_find_the_gradients_of_one"],
        "`FusedEmaAdam`": ["test_optim_distributed weights_and_averages_are_those_of_one_process"],
        "host NPU": [
            "test_optim_distributed weights_and_averages_are_those_of_one_process",
            "test_transformers_wrapped several_processes_find_the_gradients_of_one",
        ],
    },
    "EMA weights of FSDP2 and FSDP1 shards": {
        "`FusedEmaAdam`": ["test_optim_sharded a_sharded_model_uses_the_averages_in_a_swap_and_the_weights_afterwards"],
        "host NPU": ["test_optim_sharded a_sharded_model_uses_the_averages_in_a_swap_and_the_weights_afterwards"],
    },
    "vocabulary parallelism": {
        "`linear_cross_entropy`": ["test_vocab_parallel results_equal_those_of_one_process"],
        "host NPU": [
            "test_vocab_parallel results_equal_those_of_one_process",
            "npu/test_vocab_parallel results_equal_those_of_one_process_on_a_cpu",
            "test_examples two_vocab_parallel_processes_on_npus_train_like_one_on_the_cpu",
        ],
    },
    "`patch()`": {
        "losses, embedding": ["test_patch modules_of_torch_call_the_functions_of_the_package"],
        "`linear_cross_entropy`": [
            "test_patch functions_are_those_of_the_package_inside_and_torchs_again_after_an_exception"
        ],
        "`FusedEmaAdam`": ["test_patch it_accepts_torchs_arguments_and_performs_torchs_step"],
        "host NPU": ["npu/test_drop_ins patched_modules_of_torch_launch_canns_operators"],
    },
    "transformers and `Trainer`": {
        "`linear_cross_entropy`": ["test_transformers loss_and_every_gradient_are_those_of_the_model_as_it_was"],
        "`FusedEmaAdam`": ["test_hf_trainer evaluation_uses_the_averages_and_restores_the_weights"],
        "host NPU": [
            "npu/test_transformers loss_and_every_gradient_are_those_of_the_model_as_it_was",
            "npu/test_trainers transformers_trains_and_evaluates_averages_on_it_as_on_a_cpu",
        ],
    },
    "PEFT": {
        "`linear_cross_entropy`": ["test_transformers_wrapped adapters_of_the_head_are_in_the_loss_without_logits"],
    },
    "other adapters of PEFT": {
        "`linear_cross_entropy`": [
            "test_transformers_adapters an_adapted_model_has_the_same_loss_without_logits_or_one_warning"
        ],
    },
    "TRL's trainers": {
        "`linear_cross_entropy`": ["test_trl metrics_and_gradients_of_a_trainer_are_those_of_the_trainer_as_it_was"],
        "host NPU": ["npu/test_trainers the_head_of_trl_finds_on_it_what_that_of_a_cpu_finds"],
    },
    "accelerate": {
        "`linear_cross_entropy`": ["test_transformers_wrapped accelerate_prepares_a_patched_model"],
    },
    "Lightning": {
        "`FusedEmaAdam`": [
            "test_lightning validation_uses_the_averages_and_restores_the_weights",
            "test_lightning_sharded a_checkpoint_of_a_sharded_model_has_full_averages_and_weights",
        ],
        "host NPU": ["npu/test_trainers lightning_trains_and_validates_averages_on_it_as_on_a_cpu"],
    },
}
