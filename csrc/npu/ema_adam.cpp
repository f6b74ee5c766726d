#include <ATen/MemoryOverlap.h>

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

struct ApplyFusedEmaAdam {
    using Cann = aclnn::ApplyFusedEmaAdam;
    static constexpr auto name = "apply_fused_ema_adam_";
    static void run(const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m, const at::Tensor& v,
                    const at::Tensor& s, const at::Tensor& step, double lr, double ema_decay, double beta1,
                    double beta2, double eps, int64_t weight_decay_mode, bool bias_correction, double weight_decay);
};

void ApplyFusedEmaAdam::run(const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m, const at::Tensor& v,
                            const at::Tensor& s, const at::Tensor& step, double lr, double ema_decay, double beta1,
                            double beta2, double eps, int64_t weight_decay_mode, bool bias_correction,
                            double weight_decay) {
    // With another mode CANN takes the gradient for the weight, and of step it reads the first element without asking
    // whether there is one.
    TORCH_CHECK((weight_decay_mode == 0 || weight_decay_mode == 1) && step.numel() > 0, name,
                ": weight_decay_mode or step is wrong");
    for (const at::Tensor* state : {&var, &m, &v, &s}) {
        at::assert_no_internal_overlap(*state);
    }
    launch<aclnn::ApplyFusedEmaAdam>(grad, InPlace{var}, InPlace{m}, InPlace{v}, InPlace{s}, step, lr, ema_decay, beta1,
                                     beta2, eps, weight_decay_mode, bias_correction, weight_decay);
    for (const at::Tensor* state : {&var, &m, &v, &s}) {
        if (!state->is_inference()) {
            state->unsafeGetTensorImpl()->bump_version();
        }
    }
}

const Register<ApplyFusedEmaAdam> apply_fused_ema_adam;
}  // namespace

}  // namespace torch_aclnn_ops
