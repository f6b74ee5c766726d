// Whether kernels must add in a fixed order; CANN reads the setting in phase one.
#pragma once

namespace torch_aclnn_ops {

// Tells CANN what torch.use_deterministic_algorithms() asks for, in torch_npu's way where it exports one.
void apply_determinism();

// Whether the program has asked for it, in torch's way or in torch_npu's.
bool is_deterministic();

}  // namespace torch_aclnn_ops
