// libmspti: torch_npu loads it for torch.profiler, which then records the CPU but no kernels.
