#include <ATen/ops/embedding.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <tuple>

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

struct EmbeddingDenseBackward {
    using Cann = aclnn::EmbeddingDenseBackward;
    static constexpr auto name = "embedding_dense_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& indices, int64_t num_weights,
                          int64_t padding_idx, bool scale_grad_by_freq);
};

// CANN compares the padding index with every index, so one that no index can equal stands for none. Negative ones other
// than -1 mean nothing to it.
uint64_t padding_index_or_none(int64_t padding_idx) {
    return padding_idx < 0 ? std::numeric_limits<uint64_t>::max() : static_cast<uint64_t>(padding_idx);
}

at::Tensor EmbeddingDenseBackward::run(const at::Tensor& grad_output, const at::Tensor& indices, int64_t num_weights,
                                       int64_t padding_idx, bool scale_grad_by_freq) {
    // CANN takes the last dimension without asking whether there is one.
    TORCH_CHECK(grad_output.dim() > 0, name, ": grad_output must have at least 1 dimension");
    at::Tensor out = make_output({num_weights, grad_output.size(-1)}, grad_output.options());
    launch<aclnn::EmbeddingDenseBackward>(grad_output, indices, static_cast<uint64_t>(num_weights),
                                          padding_index_or_none(padding_idx), scale_grad_by_freq, out);
    return out;
}

// The autograd function for eager calls; the gradient does not depend on the table.
struct Embedding : torch::autograd::Function<Embedding> {
    static constexpr auto name = "embedding";

    static at::Tensor call(const at::Tensor& input, const at::Tensor& weight, int64_t padding_idx,
                           bool scale_grad_by_freq) {
        return apply(input, weight, padding_idx, scale_grad_by_freq);
    }
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                              const at::Tensor& weight, int64_t padding_idx, bool scale_grad_by_freq) {
        const at::AutoDispatchBelowAutograd below;
        context->save_for_backward({input});
        context->saved_data["options"] = std::tuple(weight.size(0), padding_idx, scale_grad_by_freq);
        return at::embedding(weight, input, padding_idx, scale_grad_by_freq);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grad_outputs) {
        const auto [num_weights, padding_idx, scale_grad_by_freq] =
            context->saved_data["options"].to<std::tuple<int64_t, int64_t, bool>>();
        const at::Tensor input = context->get_saved_variables()[0];
        return {at::Tensor(),
                DispatchOf<EmbeddingDenseBackward>::call(grad_outputs[0], input, num_weights, padding_idx,
                                                         scale_grad_by_freq),
                at::Tensor(), at::Tensor()};
    }
};

const RegisterFunction<Embedding> embedding;
const Register<EmbeddingDenseBackward> embedding_dense_backward;
}  // namespace

}  // namespace torch_aclnn_ops
