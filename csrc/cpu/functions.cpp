// The Python module torch_aclnn_ops._cpu: the drop-ins' autograd functions for eager calls on CPU tensors.
//
// Their gradients are torch's own kernels, as in torch_aclnn_ops/functional, or the raw operators for double backward
// and inside modes and transforms.
#include "../autograd/functions.h"

#include <ATen/ops/binary_cross_entropy_backward.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/mse_loss_backward.h>

#include "../autograd/binary_cross_entropy.h"
#include "../autograd/embedding.h"
#include "../autograd/mse_loss.h"
#include "../autograd/raw_operator.h"
#include "dispatch.h"
#include "few_logits.h"
#include "unchanged.h"

namespace torch_aclnn_ops {
namespace {

// Whether a call would be dispatched to the CPU kernel directly, apart from autograd and autocast, which are no-ops
// here.
template <class... Arguments>
bool reaches_cpu_directly(const Arguments&... arguments) {
    const bool grad_mode = c10::GradMode::is_enabled();
    return reaches_cpu(c10::autocast_dispatch_keyset, arguments...) && !(needs_derivative(arguments, grad_mode) || ...);
}

template <class Operator, class Function>
struct CpuKernel;

// An Operator has the name of the raw operator, and a kernel of torch that computes the same as run().
template <class Operator, class Result, class... Parameters>
struct CpuKernel<Operator, Result (*)(Parameters...)> {
    static Result call(Parameters... arguments) {
        return reaches_cpu_directly(arguments...)
                   ? Operator::run(arguments...)
                   : RawOperator<Operator, Result (*)(Parameters...)>::call(arguments...);
    }
};

template <class Operator>
using CpuKernelOf = CpuKernel<Operator, decltype(&Operator::run)>;

struct MseLossBackward {
    static constexpr auto name = "mse_loss_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          int64_t reduction) {
        return at::mse_loss_backward(grad_output, self, target, reduction);
    }
};

struct BinaryCrossEntropyBackward {
    static constexpr auto name = "binary_cross_entropy_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          const std::optional<at::Tensor>& weight, int64_t reduction) {
        return at::binary_cross_entropy_backward(grad_output, self, target, weight, reduction);
    }
};

// torch's float16 lower bound of the denominator is 0, so the gradient at 0 and 1 would be NaN: use the raw operator.
struct BinaryCrossEntropyKernel {
    static at::Tensor call(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                           const std::optional<at::Tensor>& weight, int64_t reduction) {
        using Kernel = BinaryCrossEntropyBackward;
        return self.scalar_type() == at::kHalf
                   ? RawOperator<Kernel, decltype(&Kernel::run)>::call(grad_output, self, target, weight, reduction)
                   : CpuKernelOf<Kernel>::call(grad_output, self, target, weight, reduction);
    }
};

struct EmbeddingDenseBackward {
    static constexpr auto name = "embedding_dense_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& indices, int64_t num_weights,
                          int64_t padding_idx, bool scale_grad_by_freq) {
        return at::embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq);
    }
};

struct MseLossOnCpu : MseLoss<MseLossOnCpu, CpuKernelOf<MseLossBackward>> {};
struct BinaryCrossEntropyOnCpu : BinaryCrossEntropy<BinaryCrossEntropyOnCpu, BinaryCrossEntropyKernel> {};
struct EmbeddingOnCpu : Embedding<EmbeddingOnCpu, CpuKernelOf<EmbeddingDenseBackward>> {};

const RegisterFunction<MseLossOnCpu> mse_loss;
const RegisterFunction<BinaryCrossEntropyOnCpu> binary_cross_entropy;
const RegisterFunction<EmbeddingOnCpu> embedding;
}  // namespace

PYBIND11_MODULE(_cpu, module) {
    module.doc() = "Operators and autograd functions for CPU tensors.";
    define_functions(module);
    module.def("placement", &placement);
    module.def("holds", &holds);
    module.def("have_grads", &have_grads);
    module.attr("few_logits") = PythonEntry<FewLogits, decltype(&FewLogits::call), FewLogitsCalls>::make(
        py::cpp_function([](const py::args&) { return py::none(); }));
}

}  // namespace torch_aclnn_ops
