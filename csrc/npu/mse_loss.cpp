#include "../autograd/mse_loss.h"

#include <ATen/ExpandUtils.h>

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

struct MseLossBackward : Signature<In, In, In, int64_t, Out> {
    static constexpr auto name = "mse_loss_backward";
    static constexpr auto cann = "aclnnMseLossBackward";
    static constexpr std::array parameters = {"gradOutput", "self", "target", "reduction", "out"};
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          int64_t reduction);
};

// The gradient has the broadcast shape of all three, even if larger than self's: CANN and the formula do not reduce it.
at::Tensor MseLossBackward::run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                                int64_t reduction) {
    const bool is_same_shape = self.sizes() == target.sizes() &&
                               (grad_output.dim() == 0 ? self.numel() > 0 : grad_output.sizes() == self.sizes());
    at::Tensor out =
        is_same_shape ? make_output(self.sizes(), self.options())
                      : make_output(at::infer_size(grad_output.sizes(), at::infer_size(self.sizes(), target.sizes())),
                                    self.options());
    launch<MseLossBackward>(grad_output, self, target, reduction, out);
    return out;
}

struct MseLossOnNpu : MseLoss<MseLossOnNpu, DispatchOf<MseLossBackward>> {};

const RegisterFunction<MseLossOnNpu> mse_loss;
const Register<MseLossBackward> mse_loss_backward;
}  // namespace

}  // namespace torch_aclnn_ops
