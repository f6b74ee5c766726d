// aclnnApplyFusedEmaAdam, an individual operator: CANN's functions are generated code, with its checks.
#include <cmath>
#include <stdexcept>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

// The indices of the tensors.
enum : std::size_t { kGrad, kVar, kM, kV, kS, kStep };

// The kernel's scalars, in single precision whatever the interface takes.
struct Hyperparameters {
    float lr;
    float ema_decay;
    float beta1;
    float beta2;
    float eps;
    std::int64_t mode;
    bool bias_correction;
    float weight_decay;
};

constexpr std::int64_t kL2 = 0;
constexpr std::int64_t kDecoupled = 1;
constexpr std::int64_t kOther = 2;

struct Block {
    std::array<float, kBlock> grad, var, m, v, s;
};

// The device's power function, in single precision.
float power(float base, float exponent) { return std::exp(exponent * std::log(base)); }

// One loop per mode, because a loop with branches is not vectorized.
template <std::int64_t mode>
void update(Block& block, std::int64_t count, const Hyperparameters& p, float step) {
    const float one_minus_beta1 = 1.0f - p.beta1;
    const float one_minus_beta2 = 1.0f - p.beta2;
    const float one_minus_ema_decay = 1.0f - p.ema_decay;
    const float correct_m = p.bias_correction ? 1.0f / (1.0f - power(p.beta1, step)) : 1.0f;
    const float correct_v = p.bias_correction ? 1.0f / (1.0f - power(p.beta2, step)) : 1.0f;
    for (std::int64_t i = 0; i < count; ++i) {
        float g = block.grad[i];
        // In other modes the kernel does not load var, and uses the gradient in its place.
        const float var = mode == kL2 || mode == kDecoupled ? block.var[i] : g;
        if (mode == kL2) g += p.weight_decay * var;
        const float m = p.beta1 * block.m[i] + one_minus_beta1 * g;
        const float v = p.beta2 * block.v[i] + g * g * one_minus_beta2;
        float change = m * correct_m / (std::sqrt(v * correct_v) + p.eps);
        if (mode == kDecoupled) change += p.weight_decay * var;
        // Later terms use these values before they are rounded to 16 bits.
        const float updated = var - p.lr * change;
        block.m[i] = m;
        block.v[i] = v;
        block.var[i] = updated;
        block.s[i] = p.ema_decay * block.s[i] + one_minus_ema_decay * updated;
    }
}

void update(Block& block, std::int64_t count, const Hyperparameters& p, float step) {
    if (p.mode == kL2) return update<kL2>(block, count, p, step);
    if (p.mode == kDecoupled) return update<kDecoupled>(block, count, p, step);
    update<kOther>(block, count, p, step);
}

void apply(const KernelArguments& arguments, const Hyperparameters& p) {
    std::int64_t step = 0;
    // Phase one does not check the size of step.
    if (arguments[kStep]->empty()) throw std::out_of_range("step has no element");
    // Only the first element of step is read, whatever the shape.
    std::memcpy(&step, arguments[kStep].data, sizeof step);
    Elements grad(arguments[kGrad]), var(arguments[kVar]), m(arguments[kM]), v(arguments[kV]), s(arguments[kS]);
    Elements new_var(var), new_m(m), new_v(v), new_s(s);
    const auto block = std::make_unique<Block>();
    const auto numel = arguments[kVar]->numel();
    for (std::int64_t done = 0; done < numel; done += kBlock) {
        const auto count = std::min(kBlock, numel - done);
        grad.read(block->grad.data(), count);
        var.read(block->var.data(), count);
        m.read(block->m.data(), count);
        v.read(block->v.data(), count);
        s.read(block->s.data(), count);
        update(*block, count, p, static_cast<float>(step));
        new_var.write(block->var.data(), count);
        new_m.write(block->m.data(), count);
        new_v.write(block->v.data(), count);
        new_s.write(block->s.data(), count);
    }
}

// The formats that generated code accepts as ND.
void require_nd(const Named& argument) {
    const int format = argument->format;
    const bool is_nd = format == ACL_FORMAT_ND || format == ACL_FORMAT_NCL || format == ACL_FORMAT_NCHW ||
                       format == ACL_FORMAT_NHWC || format == ACL_FORMAT_NCDHW || format == kFormatDhwcn;
    require(is_nd, kParamInvalid, argument.name, " has format ", format, ", which does not count as ND");
}

Plan plan(Arguments states, const Named& step, const Hyperparameters& p) {
    const auto& grad = *states.begin();
    const auto outputs = std::span(states.begin() + 1, states.end());
    // Strided states are copied before step is checked.
    require_copyable(states);
    require_copyable({step});
    constexpr DtypeSet dtypes{ACL_FLOAT, ACL_FLOAT16, ACL_BF16};
    for (const auto& state : states) {
        require_dtype(state, dtypes);
        require_same_dtype(state, grad);
        require_nd(state);
    }
    require_dtype(step, {ACL_INT64});
    require_nd(step);
    Plan plan{.outputs = {kVar, kM, kV, kS}};
    // CANN compares the shapes only if there are elements to write.
    if (std::all_of(outputs.begin(), outputs.end(), [](const Named& out) { return out->empty(); })) return plan;
    for (const auto& state : states) {
        if (state->shape == grad->shape) continue;
        require(false, kTilingError, state.name, " has shape ", to_string(state->shape), ", which differs from grad's ",
                to_string(grad->shape));
    }
    // Strided outputs are copied back from a tensor whose format must have a name in the C interface.
    for (const auto& out : outputs) {
        const bool nameless = static_cast<int>(out->format) == kFormatDhwcn;
        require(!nameless || !is_copied(out.layout()), kInnerNullPointer, out.name, " is strided and has format ",
                kFormatDhwcn);
    }
    Intermediates copies;
    for (const auto& state : states) copies.argument(state.layout(), state->dtype);
    copies.argument(step.layout(), step->dtype);
    plan.workspace_size = kLibraryWorkspace + copies.total();
    plan.kernel = [p](const KernelArguments& arguments) { apply(arguments, p); };
    return plan;
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnApplyFusedEmaAdam, kAdam)
HOST_NPU_PHASE_ONE aclnnApplyFusedEmaAdamGetWorkspaceSize(const aclTensor* grad, aclTensor* varRef, aclTensor* mRef,
                                                          aclTensor* vRef, aclTensor* sRef, const aclTensor* step,
                                                          double lr, double emaDecay, double beta1, double beta2,
                                                          double eps, std::int64_t mode, bool biasCorrection,
                                                          double weightDecay, std::uint64_t* workspaceSize,
                                                          aclOpExecutor** executor) {
    // Generated code first looks up the chip's description of the kernel.
    if (!has_bfloat16()) {
        return failed(kNullPointer, kAdam.phase_two, "this chip has no description of the operator's kernel");
    }
    return PhaseOne(kAdam, workspaceSize, executor)
        .with(grad, varRef, mRef, vRef, sRef, step, lr, emaDecay, beta1, beta2, eps, mode, biasCorrection, weightDecay)
        .run_individual({"grad", "varRef", "mRef", "vRef", "sRef", "step"}, [&] {
            const Hyperparameters p{.lr = static_cast<float>(lr),
                                    .ema_decay = static_cast<float>(emaDecay),
                                    .beta1 = static_cast<float>(beta1),
                                    .beta2 = static_cast<float>(beta2),
                                    .eps = static_cast<float>(eps),
                                    .mode = mode,
                                    .bias_correction = biasCorrection,
                                    .weight_decay = static_cast<float>(weightDecay)};
            return plan({{"grad", grad}, {"varRef", varRef}, {"mRef", mRef}, {"vRef", vRef}, {"sRef", sRef}},
                        {"step", step}, p);
        });
}
