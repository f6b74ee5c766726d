#include "embedding.h"

#include <limits>

#include "../autograd/embedding.h"
#include "determinism.h"
#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {

bool skips_padding_wrongly(int64_t rows, int64_t features, int64_t num_weights, bool is_deterministic) {
    constexpr int64_t kLeastRows = 512, kMostFeatures = 512, kMostWeights = 1 << 24;  // CANN's
    constexpr int64_t kLeastBytes = 100 << 20, kItemSize = 2;
    const bool is_sorted = is_deterministic || features > kMostFeatures || num_weights > kMostWeights;
    return is_sorted && rows >= kLeastRows && (rows + num_weights) * features * kItemSize >= kLeastBytes;
}

namespace {

// CANN declares the output const and both counts unsigned.
struct EmbeddingDenseBackward : Signature<In, In, uint64_t, uint64_t, bool, In> {
    static constexpr auto name = "embedding_dense_backward";
    static constexpr auto cann = "aclnnEmbeddingDenseBackward";
    static constexpr std::array parameters = {"grad", "indices", "numWeights", "paddingIdx", "scaleGradByFreq", "out"};
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& indices, int64_t num_weights,
                          int64_t padding_idx, bool scale_grad_by_freq);
};

// CANN compares the padding index with every index, so a value that no index can equal disables it. Negative values
// other than -1 have no meaning.
uint64_t padding_index_or_none(int64_t padding_idx) {
    return padding_idx < 0 ? std::numeric_limits<uint64_t>::max() : static_cast<uint64_t>(padding_idx);
}

at::Tensor EmbeddingDenseBackward::run(const at::Tensor& grad_output, const at::Tensor& indices, int64_t num_weights,
                                       int64_t padding_idx, bool scale_grad_by_freq) {
    // CANN reads the last dimension without checking that there is one.
    TORCH_CHECK(grad_output.dim() > 0, name, ": grad_output must have at least 1 dimension");
    at::Tensor out = make_output({num_weights, grad_output.size(-1)}, grad_output.options());
    const bool goes_round =
        padding_idx >= 0 && padding_idx < num_weights && !scale_grad_by_freq && grad_output.element_size() == 2 &&
        skips_padding_wrongly(indices.numel(), grad_output.size(-1), num_weights, is_deterministic());
    launch<EmbeddingDenseBackward>(grad_output, indices, static_cast<uint64_t>(num_weights),
                                   padding_index_or_none(goes_round ? -1 : padding_idx), scale_grad_by_freq, out);
    if (goes_round) {
        out.select(0, padding_idx).zero_();
    }
    return out;
}

struct EmbeddingOnNpu : Embedding<EmbeddingOnNpu, DispatchOf<EmbeddingDenseBackward>> {};

const RegisterFunction<EmbeddingOnNpu> embedding;
const Register<EmbeddingDenseBackward> embedding_dense_backward;
}  // namespace

}  // namespace torch_aclnn_ops
