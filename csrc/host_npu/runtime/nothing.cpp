// libge_runner, libgraph and libacl_tdt_channel: torch_npu is linked with them and calls none of their functions unless
// it compiles graphs or feeds data queues.
