// A step of Adam with an EMA of the weights for lists of parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_aclnn_ops {

// Increments the step counts, and calls apply_fused_ema_adam_ for each parameter of one device.
//
// Phase one of every call runs before anything is written. The calls share one workspace.
void apply_fused_ema_adam_list(const std::vector<at::Tensor>& grads, const std::vector<at::Tensor>& vars,
                               const std::vector<at::Tensor>& ms, const std::vector<at::Tensor>& vs,
                               const std::vector<at::Tensor>& ss, const std::vector<at::Tensor>& steps, double lr,
                               double ema_decay, double beta1, double beta2, double eps, int64_t weight_decay_mode,
                               bool bias_correction, double weight_decay);

}  // namespace torch_aclnn_ops
