#include <ATen/core/Reduction.h>
#include <ATen/ops/binary_cross_entropy.h>

#include "launch.h"
#include "loss_function.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

struct BinaryCrossEntropyBackward {
    using Cann = aclnn::BinaryCrossEntropyBackward;
    static constexpr auto name = "binary_cross_entropy_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          const std::optional<at::Tensor>& weight, int64_t reduction);
};

// CANN's checks accept a target or weight that broadcasts, but kernels of some devices take them to have self's shape.
at::Tensor with_shape_of(const at::Tensor& tensor, const at::Tensor& self) {
    return tensor.sizes() == self.sizes() || self.numel() == 0 ? tensor : tensor.expand_as(self).contiguous();
}

at::Tensor BinaryCrossEntropyBackward::run(const at::Tensor& grad_output, const at::Tensor& self,
                                           const at::Tensor& target, const std::optional<at::Tensor>& weight,
                                           int64_t reduction) {
    at::Tensor out = make_output(self.sizes(), self.options());
    const bool has_weight = weight.has_value() && weight->defined();
    launch<aclnn::BinaryCrossEntropyBackward>(grad_output, self, with_shape_of(target, self),
                                              has_weight ? with_shape_of(*weight, self) : at::Tensor(), reduction, out);
    return out;
}

struct BinaryCrossEntropy {
    static constexpr auto name = "binary_cross_entropy";
    static constexpr bool is_function_of_difference = false;
    using Weight = std::optional<at::Tensor>;

    static at::Tensor call(const at::Tensor& input, const at::Tensor& target, const Weight& weight, int64_t reduction) {
        return LossFunction<BinaryCrossEntropy>::apply(input, target, weight, reduction);
    }
    static at::Tensor forward(const at::Tensor& input, const at::Tensor& target, const Weight& weight,
                              int64_t reduction) {
        return at::binary_cross_entropy(input, target, weight, reduction);
    }
    static at::Tensor grad_input(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& target,
                                 const Weight& weight, int64_t reduction) {
        return DispatchOf<BinaryCrossEntropyBackward>::call(grad_output, input, target, weight, reduction);
    }
    // The loss is linear in the target: d/dy of -(y log x + (1 - y) log(1 - x)) is log(1 - x) - log x.
    static at::Tensor grad_target(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor&,
                                  const Weight& weight, int64_t reduction) {
        at::Tensor gradient = input.neg().add(1).log().sub(input.log()).mul(grad_output);
        gradient = weight.has_value() ? gradient.mul(*weight) : gradient;
        return reduction == at::Reduction::Mean ? gradient.div(input.numel()) : gradient;
    }
};

const RegisterFunction<BinaryCrossEntropy> binary_cross_entropy;
const Register<BinaryCrossEntropyBackward> binary_cross_entropy_backward;
}  // namespace

}  // namespace torch_aclnn_ops
