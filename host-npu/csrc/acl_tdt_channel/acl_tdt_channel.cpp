// libacl_tdt_channel: torch_npu links against it, but calls it only to feed data queues.
