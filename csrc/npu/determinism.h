// The deterministic mode, which CANN reads in phase one.
#pragma once

namespace torch_aclnn_ops {

// Passes the setting of torch.use_deterministic_algorithms() to CANN, through torch_npu if it exports a function.
void apply_determinism();

// Whether deterministic mode is enabled in torch or torch_npu.
bool is_deterministic();

}  // namespace torch_aclnn_ops
