#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <initializer_list>
#include <vector>

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

// All factors are doubles, though the kernel computes in float.
struct ApplyFusedEmaAdam
    : Signature<In, Out, Out, Out, Out, In, double, double, double, double, double, int64_t, bool, double> {
    static constexpr auto name = "apply_fused_ema_adam_";
    static constexpr auto cann = "aclnnApplyFusedEmaAdam";
    static constexpr std::array parameters = {"grad", "varRef", "mRef",           "vRef",       "sRef",
                                              "step", "lr",     "emaDecay",       "beta1",      "beta2",
                                              "eps",  "mode",   "biasCorrection", "weightDecay"};
    static void run(const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m, const at::Tensor& v,
                    const at::Tensor& s, const at::Tensor& step, double lr, double ema_decay, double beta1,
                    double beta2, double eps, int64_t weight_decay_mode, bool bias_correction, double weight_decay);
};

// Whether the in-place checks, which are in Python, may fail and must be run.
bool may_be_refused(std::initializer_list<const at::Tensor*> written, std::initializer_list<const at::Tensor*> read) {
    std::vector<const at::Tensor*> others(read);
    for (const at::Tensor* state : written) {
        if ((state->is_inference() && !c10::InferenceMode::is_enabled()) ||
            at::has_internal_overlap(*state) != at::MemOverlap::No) {
            return true;
        }
        for (const at::Tensor* other : others) {
            if (state->is_alias_of(*other) && at::get_overlap_status(*state, *other) != at::MemOverlapStatus::No) {
                return true;
            }
        }
        others.push_back(state);
    }
    return false;
}

void ApplyFusedEmaAdam::run(const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m, const at::Tensor& v,
                            const at::Tensor& s, const at::Tensor& step, double lr, double ema_decay, double beta1,
                            double beta2, double eps, int64_t weight_decay_mode, bool bias_correction,
                            double weight_decay) {
    // In another mode CANN uses the gradient as the weight, and it reads the first element of step unchecked.
    TORCH_CHECK((weight_decay_mode == 0 || weight_decay_mode == 1) && step.numel() > 0, name,
                ": weight_decay_mode or step is wrong");
    if (may_be_refused({&var, &m, &v, &s}, {&grad, &step})) {
        check_in_python(name,
                        {grad, var, m, v, s, step, lr, ema_decay, beta1, beta2, eps, weight_decay_mode, bias_correction,
                         weight_decay},
                        false);
    }
    launch<ApplyFusedEmaAdam>(grad, InPlace{var}, InPlace{m}, InPlace{v}, InPlace{s}, step, lr, ema_decay, beta1, beta2,
                              eps, weight_decay_mode, bias_correction, weight_decay);
    for (const at::Tensor* state : {&var, &m, &v, &s}) {
        if (!state->is_inference()) {
            state->unsafeGetTensorImpl()->bump_version();
        }
    }
}

const Register<ApplyFusedEmaAdam> apply_fused_ema_adam;
}  // namespace

}  // namespace torch_aclnn_ops
