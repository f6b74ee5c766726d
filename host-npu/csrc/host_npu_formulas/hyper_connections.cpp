// Manifold-constrained hyper-connections (arXiv:2512.24880): several residual streams, mixed by doubly stochastic
// matrices.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// torch_npu stores the rows of all steps, padded to 8 numbers.
constexpr std::int64_t kRow = 8;

void keep(const std::vector<Tensor>& steps, const Out& out) {
    const auto rows = at::stack(steps);
    TORCH_CHECK(rows.size(-1) <= kRow, "the host NPU takes rows of at most 8 numbers, not ", rows.size(-1));
    out = at::constant_pad_nd(rows, {0, kRow - rows.size(-1)}).reshape(out.sizes());
}

// Normalizes rows and columns alternately, columns last.
void sinkhorn(const Tensor& x, float epsilon, std::int64_t iterations, const Out& out, const OptionalOut& norm_out,
              const OptionalOut& sum_out) {
    TORCH_CHECK(x.dim() >= 3 && x.size(-1) == x.size(-2), "x has shape ", x.sizes(),
                "; its last two dimensions must be equal");
    TORCH_CHECK(iterations >= 1 && iterations <= 100, "num_iters is ", iterations, " instead of 1 to 100");
    auto norm = at::softmax(x, -1) + epsilon;
    // Step 0 divides by no sum.
    std::vector<Tensor> norms{norm}, sums{norm.sum(-1).zero_()};
    for (std::int64_t step = 1; step < 2 * iterations; ++step) {
        const auto sum = norm.sum(step % 2 == 1 ? -2 : -1, true) + epsilon;
        norm = norm / sum;
        norms.push_back(norm);
        sums.push_back(sum.squeeze(step % 2 == 1 ? -2 : -1));
    }
    out = norm;
    if (!norm_out || !sum_out) return;
    keep(norms, *norm_out);
    keep(sums, *sum_out);
}
const Formula<"aclnnMhcSinkhorn", sinkhorn> doubly_stochastic;

void sinkhorn_grad(const Tensor& dy, const Tensor& norms, const Tensor& sums, const Out& dx) {
    const auto size = dy.size(-1);
    TORCH_CHECK(size > 0, "dy has shape ", dy.sizes(), ", which has no streams");
    const auto tokens = dy.numel() / (size * size);
    const auto each = norms.reshape({-1, tokens, size, kRow}).narrow(-1, 0, size);
    const auto divisors = sums.reshape({-1, tokens, kRow}).narrow(-1, 0, size);
    const auto steps = each.size(0);
    auto grad = dy.reshape({tokens, size, size});
    for (auto step = steps - 1; step >= 1; --step) {
        // For y = x / (sum x + epsilon): dx = (dy - sum(dy y)) / (sum x + epsilon).
        const auto dim = step % 2 == 1 ? -2 : -1;
        grad = (grad - (grad * each[step]).sum(dim, true)) / divisors[step].unsqueeze(dim);
    }
    // The derivative of the softmax. As in CANN's document, it uses the softmax plus epsilon.
    dx = ((grad - (grad * each[0]).sum(-1, true)) * each[0]).reshape(dy.sizes());
}
const Formula<"aclnnMhcSinkhornBackward", sinkhorn_grad> doubly_stochastic_backward;

// Each token has N streams of H elements.
void require_streams(const Tensor& x, const OptionalTensor& mix, const Tensor& layer, const Tensor& post) {
    std::vector<Shaped> all{{"x", x.sizes(), "...t N H"}};
    if (mix) all.push_back({"h_res", mix->sizes(), "...t N N"});
    all.push_back({"h_out", layer.sizes(), "...t H"});
    all.push_back({"h_post", post.sizes(), "...t N"});
    require_shapes(all);
}

// Mixes the streams x and adds the layer's output to each.
void mhc_post(const Tensor& x, const OptionalTensor& mix, const Tensor& layer, const Tensor& post, const Out& out) {
    require_streams(x, mix, layer, post);
    const auto mixed = mix ? mix->transpose(-1, -2).matmul(x) : x;
    out = mixed + post.unsqueeze(-1) * layer.unsqueeze(-2);
}
const Formula<"aclnnMhcPost", mhc_post> mixed_streams;

void mhc_post_grad(const Tensor& dy, const Tensor& x, const OptionalTensor& mix, const Tensor& layer,
                   const Tensor& post, const Out& dx, const OptionalOut& dmix, const Out& dlayer, const Out& dpost) {
    require_streams(x, mix, layer, post);
    require_shapes({{"x", x.sizes(), "...x"}, {"dy", dy.sizes(), "...x"}});
    dx = mix ? mix->matmul(dy) : dy;
    if (mix && dmix) *dmix = x.matmul(dy.transpose(-1, -2));
    dlayer = (dy * post.unsqueeze(-1)).sum(-2);
    dpost = (dy * layer.unsqueeze(-2)).sum(-1);
}
const Formula<"aclnnMhcPostBackward", mhc_post_grad> mixed_streams_backward;

}  // namespace
}  // namespace host_npu
