// libge_runner: torch_npu is linked with it, and calls its functions only to compile graphs.
