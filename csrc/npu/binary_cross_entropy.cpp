#include "../autograd/binary_cross_entropy.h"

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

struct BinaryCrossEntropyBackward : Signature<In, In, In, In, int64_t, Out> {
    static constexpr auto name = "binary_cross_entropy_backward";
    static constexpr auto cann = "aclnnBinaryCrossEntropyBackward";
    static constexpr std::array parameters = {"gradOutput", "self", "target", "weightOptional", "reduction", "out"};
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          const std::optional<at::Tensor>& weight, int64_t reduction);
};

// CANN's checks accept a target or weight that broadcasts, but some kernels assume self's shape.
at::Tensor with_shape_of(const at::Tensor& tensor, const at::Tensor& self) {
    return tensor.sizes() == self.sizes() || self.numel() == 0 ? tensor : tensor.expand_as(self).contiguous();
}

at::Tensor BinaryCrossEntropyBackward::run(const at::Tensor& grad_output, const at::Tensor& self,
                                           const at::Tensor& target, const std::optional<at::Tensor>& weight,
                                           int64_t reduction) {
    at::Tensor out = make_output(self.sizes(), self.options());
    const bool has_weight = weight.has_value() && weight->defined();
    launch<BinaryCrossEntropyBackward>(grad_output, self, with_shape_of(target, self),
                                       has_weight ? with_shape_of(*weight, self) : at::Tensor(), reduction, out);
    return out;
}

struct BinaryCrossEntropyOnNpu : BinaryCrossEntropy<BinaryCrossEntropyOnNpu, DispatchOf<BinaryCrossEntropyBackward>> {};

const RegisterFunction<BinaryCrossEntropyOnNpu> binary_cross_entropy;
const Register<BinaryCrossEntropyBackward> binary_cross_entropy_backward;
}  // namespace

}  // namespace torch_aclnn_ops
