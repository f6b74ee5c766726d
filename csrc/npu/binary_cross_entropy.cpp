
#include "dispatch.h"
#include "launch.h"
#include "operators.h"

namespace torch_aclnn_ops {
namespace {

// CANN's checks accept a target or weight that broadcasts, but kernels of some devices take them to have self's shape.
at::Tensor with_shape_of(const at::Tensor& tensor, const at::Tensor& self) {
    return tensor.sizes() == self.sizes() || self.numel() == 0 ? tensor : tensor.expand_as(self).contiguous();
}

}  // namespace

at::Tensor BinaryCrossEntropyBackward::run(const at::Tensor& grad_output, const at::Tensor& self,
                                           const at::Tensor& target, const std::optional<at::Tensor>& weight,
                                           int64_t reduction) {
    at::Tensor out = make_output(self.sizes(), self.options());
    const bool has_weight = weight.has_value() && weight->defined();
    launch<aclnn::BinaryCrossEntropyBackward>(grad_output, self, with_shape_of(target, self),
                                              has_weight ? with_shape_of(*weight, self) : at::Tensor(), reduction, out);
    return out;
}

TORCH_LIBRARY_IMPL(torch_aclnn_ops, PrivateUse1, library) {
    library.impl(BinaryCrossEntropyBackward::name, TORCH_FN(DispatchOf<BinaryCrossEntropyBackward>::kernel));
}

TORCH_LIBRARY_IMPL(torch_aclnn_ops, AutogradPrivateUse1, library) {
    library.impl(BinaryCrossEntropyBackward::name, TORCH_FN(DispatchOf<BinaryCrossEntropyBackward>::autograd));
}

}  // namespace torch_aclnn_ops
