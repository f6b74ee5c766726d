// libacl_tdt_channel: torch_npu is linked with it, and calls its functions only to feed data queues.
