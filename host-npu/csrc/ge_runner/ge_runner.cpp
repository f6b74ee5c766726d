// libge_runner: torch_npu links against it, but calls it only to compile graphs.
