#include "determinism.h"

#include <ATen/Context.h>
#include <acl/acl_rt.h>

#include <atomic>

// Weak: torch_npu exports these two from 2.13.0, and the runtime's function is in a library of CANN.
namespace c10_npu {
uint32_t GetDeterministicLevel() __attribute__((weak));
}
namespace at_npu::native {
void ApplyDeterministicLevel(int64_t level, bool deterministic, bool is_aclnn) __attribute__((weak));
}
extern "C" aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) __attribute__((weak));

namespace torch_aclnn_ops {

namespace {

bool torch_npu_has_levels() {
    return c10_npu::GetDeterministicLevel != nullptr && at_npu::native::ApplyDeterministicLevel != nullptr;
}

void apply_through_torch_npu() {
    at_npu::native::ApplyDeterministicLevel(c10_npu::GetDeterministicLevel(),
                                            at::globalContext().deterministicAlgorithms(), true);
}

void apply_determinism_to_context() {
    if (aclrtCtxSetSysParamOpt != nullptr) {
        const aclError status =
            aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, at::globalContext().deterministicAlgorithms() ? 1 : 0);
        TORCH_CHECK(status == ACL_SUCCESS, "torch_aclnn_ops: the deterministic mode could not be set, status ", status);
    }
}

}  // namespace

bool is_deterministic() {
    return at::globalContext().deterministicAlgorithms() ||
           (torch_npu_has_levels() && c10_npu::GetDeterministicLevel() != 0);
}

void apply_determinism() {
    static std::atomic<bool> was_asked_for{false};
    if (is_deterministic()) {
        was_asked_for = true;
    }
    // Programs that never enable it have no overhead. If another operator left it enabled, kernels are only slower.
    if (was_asked_for) {
        (torch_npu_has_levels() ? apply_through_torch_npu : apply_determinism_to_context)();
    }
}

}  // namespace torch_aclnn_ops
