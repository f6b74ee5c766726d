// libhcomm: torch_npu looks for HcclGroupStart and HcclGroupEnd here, and finds those of libhccl, with which it is
// linked.
