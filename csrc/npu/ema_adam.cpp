#include "ema_adam.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <vector>

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

// All factors are doubles, although the kernel computes in float.
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

// Whether the in-place checks in Python may fail and must be run.
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

void bump_version(const at::Tensor& tensor) {
    if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
    }
}

struct Tensors {
    const at::Tensor& grad;
    const at::Tensor& var;
    const at::Tensor& m;
    const at::Tensor& v;
    const at::Tensor& s;
    const at::Tensor& step;
};

// The numbers are the operator's arguments from lr to weight_decay.
template <class... Numbers>
Launch prepare_call(const Tensors& t, Numbers... numbers) {
    const int64_t weight_decay_mode = std::get<5>(std::tuple(numbers...));
    // In other modes CANN uses the gradient as the weight; it also reads the first element of step unchecked.
    TORCH_CHECK((weight_decay_mode == 0 || weight_decay_mode == 1) && t.step.numel() > 0, ApplyFusedEmaAdam::name,
                ": weight_decay_mode or step is wrong");
    if (may_be_refused({&t.var, &t.m, &t.v, &t.s}, {&t.grad, &t.step})) {
        check_in_python(ApplyFusedEmaAdam::name, {t.grad, t.var, t.m, t.v, t.s, t.step, numbers...}, false);
    }
    return prepare<ApplyFusedEmaAdam>(t.grad, InPlace{t.var}, InPlace{t.m}, InPlace{t.v}, InPlace{t.s}, t.step,
                                      numbers...);
}

template <class... Numbers>
void enqueue_call(Launch& launch, const Workspace& workspace, const Tensors& t, Numbers... numbers) {
    enqueue<ApplyFusedEmaAdam>(launch, workspace, t.grad, InPlace{t.var}, InPlace{t.m}, InPlace{t.v}, InPlace{t.s},
                               t.step, numbers...);
    for (const at::Tensor* state : {&t.var, &t.m, &t.v, &t.s}) {
        bump_version(*state);
    }
}

void ApplyFusedEmaAdam::run(const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m, const at::Tensor& v,
                            const at::Tensor& s, const at::Tensor& step, double lr, double ema_decay, double beta1,
                            double beta2, double eps, int64_t weight_decay_mode, bool bias_correction,
                            double weight_decay) {
    const Tensors tensors{grad, var, m, v, s, step};
    const auto with_numbers = [&](const auto& function) {
        return function(lr, ema_decay, beta1, beta2, eps, weight_decay_mode, bias_correction, weight_decay);
    };
    Launch launch = with_numbers([&](auto... numbers) { return prepare_call(tensors, numbers...); });
    const Workspace workspace(launch.needed_workspace());
    with_numbers([&](auto... numbers) { enqueue_call(launch, workspace, tensors, numbers...); });
}

// Adds one to all step counts, with one launch if they are adjacent in one tensor, as FusedEmaAdam's are.
void increment(const std::vector<at::Tensor>& steps) {
    for (size_t begin = 0; begin < steps.size();) {
        const at::Tensor& first = steps[begin];
        int64_t end = first.storage_offset();
        size_t i = begin;
        for (; i < steps.size(); ++i) {
            const at::Tensor& step = steps[i];
            if (!step.is_contiguous() || !step.is_alias_of(first) || step.storage_offset() != end) {
                break;
            }
            end += step.numel();
        }
        if (i > begin + 1) {
            first.as_strided({end - first.storage_offset()}, {1}, first.storage_offset()).add_(1);
        } else {
            first.add_(1);
            i = begin + 1;
        }
        for (; begin < i; ++begin) {
            bump_version(steps[begin]);
        }
    }
}

const Register<ApplyFusedEmaAdam> apply_fused_ema_adam;

}  // namespace

void apply_fused_ema_adam_list(const std::vector<at::Tensor>& grads, const std::vector<at::Tensor>& vars,
                               const std::vector<at::Tensor>& ms, const std::vector<at::Tensor>& vs,
                               const std::vector<at::Tensor>& ss, const std::vector<at::Tensor>& steps, double lr,
                               double ema_decay, double beta1, double beta2, double eps, int64_t weight_decay_mode,
                               bool bias_correction, double weight_decay) {
    const size_t count = grads.size();
    for (const auto* list : {&vars, &ms, &vs, &ss, &steps}) {
        TORCH_CHECK(list->size() == count, "apply_fused_ema_adam_list: the lists must have the same length");
    }
    if (count == 0) {
        return;
    }
    const auto prepare_checked = [](const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m,
                                    const at::Tensor& v, const at::Tensor& s, const at::Tensor& step,
                                    auto... numbers) { return prepare_call({grad, var, m, v, s, step}, numbers...); };
    std::vector<Launch> launches;
    launches.reserve(count);
    uint64_t size = 0;
    for (size_t i = 0; i < count; ++i) {
        launches.push_back(DispatchOf<ApplyFusedEmaAdam>::checked(prepare_checked, grads[i], vars[i], ms[i], vs[i],
                                                                  ss[i], steps[i], lr, ema_decay, beta1, beta2, eps,
                                                                  weight_decay_mode, bias_correction, weight_decay));
        size = std::max(size, launches.back().needed_workspace());
    }
    const c10::OptionalDeviceGuard guard(grads[0].device());
    const Workspace workspace(size);
    const at::AutoDispatchBelowADInplaceOrView below;
    increment(steps);
    for (size_t i = 0; i < count; ++i) {
        enqueue_call(launches[i], workspace, Tensors{grads[i], vars[i], ms[i], vs[i], ss[i], steps[i]}, lr, ema_decay,
                     beta1, beta2, eps, weight_decay_mode, bias_correction, weight_decay);
    }
}

}  // namespace torch_aclnn_ops
