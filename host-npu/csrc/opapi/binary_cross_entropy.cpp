// aclnnBinaryCrossEntropy and aclnnBinaryCrossEntropyBackward.
#include <algorithm>
#include <cmath>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/native_kernels.h"
#include "opapi/reduction.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

const NativeKernels native{"aten::binary_cross_entropy", "aten::binary_cross_entropy_backward"};

// Keeps a gradient finite where self is 0 or 1.
constexpr float kSmallestDenominator = 1e-12f;
// Keeps a loss finite where self is 0 or 1.
constexpr float kSmallestLog = -100.0f;

// NaN stays NaN, unlike in std::max(value, bound).
float at_least(float bound, float value) { return value < bound ? bound : value; }

float loss(float x, float y, float weight) {
    const float log_x = at_least(kSmallestLog, std::log(x));
    const float log_rest = at_least(kSmallestLog, std::log(1.0f - x));
    return -(y * log_x + (1.0f - y) * log_rest) * weight;
}

// Conditions that CANN checks when it launches the kernel, and the host NPU already in phase one.
void require_kernel(const Named& self, const Named& target, const Named& weight, std::int64_t reduction) {
    require(self->dtype == target->dtype, kInnerNullPointer, "no kernel takes self in ", dtype_name(self->dtype),
            " and target in ", dtype_name(target->dtype));
    const bool newest = soc() == Soc::Ascend950;
    require(!newest || reduction == kNone || self->shape.rank() <= 8, kInnerNullPointer,
            "the tiling of the reduction failed: self has ", self->shape.rank(), " dimensions, more than 8");
    if (weight.tensor == nullptr || weight->shape == self->shape) return;
    // The newest tiling compares the shapes, but treats a scalar as a tensor of one element.
    if (newest && weight->shape.rank() + self->shape.rank() == 1 && weight->numel() == self->numel()) return;
    if (!newest && broadcast({&weight->shape, &self->shape}) == self->shape) return;
    require(false, kInnerNullPointer, "the kernel does not take weight's shape ", to_string(weight->shape),
            " with self's ", to_string(self->shape));
}

Plan plan_forward(const Named& self, const Named& target, const Named& weight, std::int64_t reduction,
                  aclTensor* const filled) {
    const Named out{"out", filled};
    // CANN finds null pointers only when it builds the graph.
    require_present({self, target, out}, kInnerNullPointer);
    for (const auto& argument : {self, target, out}) require_dtype(argument, float_dtypes());
    const bool weighted = weight.tensor != nullptr;
    if (weighted) {
        require_dtype(weight, float_dtypes());
        for (const auto& argument : {target, weight, out}) require_same_dtype(argument, self);
    }
    require_shape(target, self->shape);
    require_reduction(reduction);

    const auto dtype = self->dtype;
    if (self->empty()) {
        // Fill all of out's storage, which CANN treats as out's original shape.
        filled->set_shape(out->storage_shape);
        require_view_copy({out->shape, dtype}, out);
        return {.kernel = [=](const KernelArguments& arguments) { fill(arguments[3], loss_of_empty(reduction)); }};
    }
    require_copyable({self, target, weight});
    require_kernel(self, target, weight, reduction);
    const Result result{reduction == kNone ? self->shape : Dims{}, dtype};
    if (!result.has_shape_of(out.layout())) require_shape(out, result.shape);
    require_view_copy(result, out);
    const auto numel = self->numel();
    Intermediates intermediates;
    for (const auto& argument : {self, target, out}) intermediates.argument(argument.layout(), dtype);
    if (weighted) intermediates.argument(weight.layout(), dtype);
    if (soc() == Soc::Ascend950) intermediates.kernel();
    return {.workspace_size = intermediates.total(), .kernel = [=](const KernelArguments& arguments) {
                const auto &self = arguments[0], &target = arguments[1], &weight = arguments[2], &out = arguments[3];
                // As on the device, the mean is a sum scaled by 1 / numel in advance.
                const float scale = reduction == kMean ? 1.0f / static_cast<float>(numel) : 1.0f;
                const auto scaled = [=](float x, float y, float w) { return loss(x, y, w) * scale; };
                const auto unweighted = [=](float x, float y) { return loss(x, y, 1.0f) * scale; };
                if (reduction == kNone && numel > 1) {
                    return weight ? map(out, dtype, scaled, self, target, weight)
                                  : map(out, dtype, unweighted, self, target);
                }
                float total = weight ? map_sum(self->shape, scaled, self, target, weight)
                                     : map_sum(self->shape, unweighted, self, target);
                if (dtype != ACL_FLOAT) round_to(dtype, &total, 1);
                fill(out, total);
            }};
}

void require_broadcasts_to_self(const Named& argument, const Named& self) {
    const auto common = broadcast({&argument->shape, &self->shape});
    if (!common) {
        require(false, kParamInvalid, argument.name, "'s shape ", to_string(argument->shape),
                " does not broadcast to self's ", to_string(self->shape));
    }
    // CANN sets no message if self would have to be expanded.
    if (*common != self->shape) throw Refusal{kParamInvalid, ""};
}

// CANN converts the result to out's format before copying it, which requires the rank that the format implies.
void require_rank_of_format(const Named& out) {
    struct Format {
        int number;
        std::size_t rank;
    };
    constexpr Format formats[] = {{ACL_FORMAT_NCHW, 4},      {ACL_FORMAT_NHWC, 4},        {ACL_FORMAT_NC1HWC0, 5},
                                  {ACL_FORMAT_FRACTAL_Z, 4}, {ACL_FORMAT_NC1HWC0_C04, 5}, {kFormatFractalZC04, 4},
                                  {ACL_FORMAT_HWCN, 4},      {ACL_FORMAT_NDHWC, 5},       {ACL_FORMAT_NCDHW, 5},
                                  {kFormatDhwcn, 5},         {ACL_FORMAT_NDC1HWC0, 6},    {kFormatFractalZ3d, 4},
                                  {ACL_FORMAT_NCL, 3}};
    for (const auto& [number, rank] : formats) {
        require(number != out->format || rank == out->shape.rank(), kInnerNullPointer, out.name, " has ",
                out->shape.rank(), " dimensions, but its format ", number, " has ", rank);
    }
}

Plan plan_backward(const Named& grad, const Named& self, const Named& target, const Named& weight,
                   std::int64_t reduction, const Named& out) {
    require_present({grad, self, target, out});
    const bool weighted = weight.tensor != nullptr;
    // Only out is checked here; the check of the shapes finds other tensors with too many dimensions.
    require_rank_at_most_8({out});
    for (const auto& argument : {self, grad, target, out}) require_dtype(argument, float_dtypes());
    if (weighted) require_dtype(weight, float_dtypes());
    require(same_format(self->format, target->format), kParamInvalid, "self and target have different formats");
    require(!weighted || same_format(self->format, weight->format), kParamInvalid,
            "self and weightOptional have different formats");
    if (!self->empty()) {
        require_shape(out, self->shape);
        require_broadcasts_to_self(target, self);
        if (weighted) require_broadcasts_to_self(weight, self);
        require_broadcasts_to_self(grad, self);
    }
    require_reduction(reduction);
    const auto dtype = promote({self->dtype, target->dtype, grad->dtype, weighted ? weight->dtype : self->dtype});
    if (self->empty()) return {};
    require_copyable({grad, self, target, weight});
    require_rank_of_format(out);

    Intermediates intermediates;
    for (const auto& argument : {grad, self, target, out}) intermediates.argument(argument.layout(), dtype);
    // A missing weight is a tensor of ones.
    weighted ? intermediates.argument(weight.layout(), dtype) : intermediates.tensor(self->shape, dtype);
    const bool newest = soc() == Soc::Ascend950;
    const float scale = reduction == kMean ? 1.0f / static_cast<float>(self->numel()) : 1.0f;
    if (newest) intermediates.kernel();
    return {.workspace_size = intermediates.total(), .kernel = [=](const KernelArguments& arguments) {
                const auto &grad = arguments[0], &self = arguments[1], &target = arguments[2], &weight = arguments[3];
                const auto& out = arguments[4];
                const auto gradient = [=](float g, float x, float y, float w) {
                    const float denominator = at_least(kSmallestDenominator, x * (1.0f - x));
                    return newest ? g * (x - y) / denominator * w * scale : (x - y) / denominator * w * g * scale;
                };
                if (weight) return map(out, dtype, gradient, grad, self, target, weight);
                map(out, dtype, [=](float g, float x, float y) { return gradient(g, x, y, 1.0f); }, grad, self, target);
            }};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnBinaryCrossEntropy, kForward)
HOST_NPU_PHASE_ONE aclnnBinaryCrossEntropyGetWorkspaceSize(const aclTensor* self, const aclTensor* target,
                                                           const aclTensor* weight, std::int64_t reduction,
                                                           aclTensor* out, std::uint64_t* workspaceSize,
                                                           aclOpExecutor** executor) {
    return PhaseOne(kForward, workspaceSize, executor).with(self, target, weight, out, reduction).run([&] {
        return plan_forward({"self", self}, {"target", target}, {"weight", weight}, reduction, out);
    });
}

HOST_NPU_PHASE_TWO(aclnnBinaryCrossEntropyBackward, kBackward)
HOST_NPU_PHASE_ONE aclnnBinaryCrossEntropyBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* self, const aclTensor* target, const aclTensor* weightOptional,
    std::int64_t reduction, aclTensor* out, std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kBackward, workspaceSize, executor)
        .with(gradOutput, self, target, weightOptional, out, reduction)
        .run([&] {
            return plan_backward({"gradOutput", gradOutput}, {"self", self}, {"target", target},
                                 {"weightOptional", weightOptional}, reduction, {"out", out});
        });
}
