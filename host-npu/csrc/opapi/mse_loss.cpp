// aclnnMseLoss, aclnnMseLossOut and aclnnMseLossBackward.
#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/native_kernels.h"
#include "opapi/reduction.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

const NativeKernels native{"aten::mse_loss", "aten::mse_loss_backward"};

// Whether the AscendC kernel is used, which does not broadcast.
template <class... Layouts>
bool has_second_kernel(const Layout& first, const Layouts&... others) {
    if (soc() == Soc::Ascend910) return false;
    return ((first.shape == others.shape && first.format == others.format) && ...);
}

bool takes_format(const Named& argument) {
    return argument->format == ACL_FORMAT_ND || argument->format == ACL_FORMAT_NCL;
}

float square(float x, float y) { return (x - y) * (x - y); }

// Checks shared by both forward functions. Returns the shape of the losses.
Dims check_forward(const Named& self, const Named& target, std::int64_t reduction, const Named& out) {
    require_present({self, target, out});
    for (const auto& argument : {self, target, out}) require_dtype(argument, float_dtypes());
    require_reduction(reduction);
    require_rank_at_most_8({self, target});
    return require_broadcast({self, target});
}

// The workspace of the kernel and of the conversions before and after it.
std::uint64_t forward_workspace(const Named& self, const Named& target, const Named& out, std::int64_t reduction,
                                aclDataType dtype) {
    Intermediates intermediates;
    intermediates.argument(self.layout(), dtype).argument(target.layout(), dtype).argument(out.layout(), dtype);
    // Without a reduction, the tiling of the AscendC kernel needs no workspace, except on the Ascend950.
    const bool reduces = reduction != kNone && takes_format(self) && has_second_kernel(self.layout(), target.layout());
    if (soc() == Soc::Ascend950 || reduces) intermediates.kernel();
    return intermediates.total();
}

Plan plan_forward(const Named& self, const Named& target, std::int64_t reduction, const Named& out) {
    const auto shape = check_forward(self, target, reduction, out);
    const auto dtype = promote({self->dtype, target->dtype});
    require_shape(out, reduction == kNone ? shape : Dims{});

    if (self->empty() || target->empty()) {
        if (reduction == kNone) return {};
        return {.kernel = [=](const KernelArguments& arguments) { fill(arguments[2], loss_of_empty(reduction)); }};
    }
    require_copyable({self, target});
    return {.workspace_size = forward_workspace(self, target, out, reduction, dtype),
            .kernel = [=](const KernelArguments& arguments) {
                const auto &self = arguments[0], &target = arguments[1], &out = arguments[2];
                if (reduction == kNone) return map(out, dtype, square, self, target);
                float total = map_sum(shape, square, self, target);
                if (reduction == kMean) total /= static_cast<float>(shape.numel());
                if (dtype != ACL_FLOAT) round_to(dtype, &total, 1);
                fill(out, total);
            }};
}

// Computes the losses, and their mean or sum over the first dimension, each rounded to the kernels' data type.
void reduce_rows(const KernelArguments& arguments, const Dims& shape, aclDataType dtype, bool mean) {
    const auto rows = shape.rank() == 0 ? 1 : shape[0];
    const auto length = shape.numel() / rows;
    std::vector<float> x(static_cast<std::size_t>(length)), y(x.size()), sums(x.size());
    Elements self(arguments[0], shape), target(arguments[1], shape);
    for (std::int64_t row = 0; row < rows; ++row) {
        self.read(x.data(), length);
        target.read(y.data(), length);
        for (std::size_t index = 0; index < x.size(); ++index) x[index] = square(x[index], y[index]);
        round_to(dtype, x.data(), length);
        for (std::size_t index = 0; index < x.size(); ++index) sums[index] += x[index];
    }
    if (mean) {
        for (auto& sum : sums) sum /= static_cast<float>(rows);
    }
    round_to(dtype, sums.data(), length);
    write_all(arguments[2], sums);
}

Plan plan_out(const Named& self, const Named& target, std::int64_t reduction, const Named& out) {
    const auto shape = check_forward(self, target, reduction, out);
    const auto rows = static_cast<std::size_t>(shape.rank() == 0 || reduction == kNone ? 0 : 1);
    require_shape(out, Dims(std::span<const std::int64_t>(shape).subspan(rows)));
    // Only aclnnMseLoss fills its output in this case.
    if (self->empty() || target->empty()) return {};
    require_copyable({self, target});
    const auto dtype = promote({self->dtype, target->dtype});
    return {.workspace_size = forward_workspace(self, target, out, reduction, dtype),
            .kernel = [=](const KernelArguments& arguments) {
                if (reduction == kNone) return map(arguments[2], dtype, square, arguments[0], arguments[1]);
                reduce_rows(arguments, shape, dtype, reduction == kMean);
            }};
}

// The factor of the differences. A mean divides by self's number of elements, even if self is broadcast.
float factor(const Layout& self, std::int64_t reduction, bool second_kernel) {
    if (reduction != kMean) return 2.0f;
    if (!second_kernel) return static_cast<float>(2.0 / static_cast<double>(self.numel()));
    float numel = 1.0f;
    for (const auto size : self.shape) numel *= static_cast<float>(size);
    return 1.0f / numel * 2.0f;
}

Plan plan_backward(const Named& grad, const Named& self, const Named& target, std::int64_t reduction,
                   const Named& out) {
    require_present({grad, self, target, out});
    require_same_dtype(grad, self);
    require_same_dtype(target, self);
    require_dtype(self, float_dtypes());
    require_dtype(out, float_dtypes());
    require_reduction(reduction);
    require_rank_at_most_8({grad, self, target});
    require_shape(out, require_broadcast({grad, self, target}));
    if (self->empty() || grad->empty() || target->empty()) return {};
    require_copyable({grad, self, target});

    const auto dtype = self->dtype;
    Intermediates intermediates;
    for (const auto& argument : {grad, self, target, out}) intermediates.argument(argument.layout(), dtype);
    const bool second = soc() != Soc::Ascend950 && has_second_kernel(self.layout(), grad.layout(), target.layout());
    // The tiling of the second kernel needs no workspace.
    if (soc() == Soc::Ascend950) intermediates.kernel();
    const auto scale = factor(self.layout(), reduction, second);
    return {.workspace_size = intermediates.total(), .kernel = [=](const KernelArguments& arguments) {
                const auto gradient = [=](float dout, float x, float y) { return (x - y) * scale * dout; };
                map(arguments[3], dtype, gradient, arguments[0], arguments[1], arguments[2]);
            }};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnMseLoss, kForward)
HOST_NPU_PHASE_ONE aclnnMseLossGetWorkspaceSize(const aclTensor* self, const aclTensor* target, std::int64_t reduction,
                                                aclTensor* out, std::uint64_t* workspaceSize,
                                                aclOpExecutor** executor) {
    return PhaseOne(kForward, workspaceSize, executor).with(self, target, reduction, out).run([&] {
        return plan_forward({"self", self}, {"target", target}, reduction, {"out", out});
    });
}

HOST_NPU_PHASE_TWO(aclnnMseLossOut, kOut)
HOST_NPU_PHASE_ONE aclnnMseLossOutGetWorkspaceSize(const aclTensor* self, const aclTensor* target,
                                                   std::int64_t reduction, aclTensor* out, std::uint64_t* workspaceSize,
                                                   aclOpExecutor** executor) {
    return PhaseOne(kOut, workspaceSize, executor).with(self, target, reduction, out).run([&] {
        return plan_out({"self", self}, {"target", target}, reduction, {"out", out});
    });
}

HOST_NPU_PHASE_TWO(aclnnMseLossBackward, kBackward)
HOST_NPU_PHASE_ONE aclnnMseLossBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                                        const aclTensor* target, std::int64_t reduction, aclTensor* out,
                                                        std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kBackward, workspaceSize, executor).with(gradOutput, self, target, out, reduction).run([&] {
        return plan_backward({"gradOutput", gradOutput}, {"self", self}, {"target", target}, reduction, {"out", out});
    });
}
