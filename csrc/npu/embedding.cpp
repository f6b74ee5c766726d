#include "../autograd/embedding.h"

#include <limits>

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

struct EmbeddingOnNpu : Embedding<EmbeddingOnNpu, DispatchOf<EmbeddingDenseBackward>> {};

const RegisterFunction<EmbeddingOnNpu> embedding;
const Register<EmbeddingDenseBackward> embedding_dense_backward;
}  // namespace

}  // namespace torch_aclnn_ops
