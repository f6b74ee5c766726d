// libhcomm, where torch_npu looks up HcclGroupStart and HcclGroupEnd. It links against libhccl, which defines them.
