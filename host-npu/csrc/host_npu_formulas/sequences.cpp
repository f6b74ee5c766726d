// Sequences: short causal convolutions, and compression of keys and values in blocks.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// Delays x [sequence, batch, size] by `by` zeros.
Tensor delayed(const Tensor& x, std::int64_t by) {
    return at::constant_pad_nd(x, {0, 0, 0, 0, by, 0}).slice(0, 0, x.size(0));
}

Tensor kept_tokens(const Tensor& x, const OptionalIntegerTensor& mask) {
    return mask ? x * mask->ne(0).t().unsqueeze(-1) : x;
}

// `dy` is the gradient of the result, or x if there is none.
void require_convolution(const Tensor& x, const Tensor& weight, const OptionalIntegerTensor& mask, const Tensor& dy) {
    std::vector<Shaped> all{{"x", x.sizes(), "S B H"}, {"weight", weight.sizes(), "W H"}, {"dy", dy.sizes(), "S B H"}};
    if (mask) all.push_back({"mask", mask->sizes(), "B S"});
    require_shapes(all);
}

void causal_conv(const Tensor& x, const Tensor& weight, const OptionalIntegerTensor& mask, const Out& out) {
    require_convolution(x, weight, mask, x);
    auto sum = at::zeros_like(x);
    for (std::int64_t by = 0; by < weight.size(0); ++by) sum = sum + delayed(x, by) * weight[weight.size(0) - 1 - by];
    out = kept_tokens(sum, mask);
}
const Formula<"aclnnMaskedCausalConv1d", causal_conv> convolution;

void causal_conv_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const OptionalIntegerTensor& mask,
                      const Out& dx, const Out& dweight) {
    require_convolution(x, weight, mask, dy);
    const auto kept = kept_tokens(dy, mask);
    const auto width = weight.size(0);
    auto sum = at::zeros_like(x);
    std::vector<Tensor> of_weights(static_cast<std::size_t>(width));
    for (std::int64_t by = 0; by < width; ++by) {
        sum = sum + delayed(kept.flip({0}), by).flip({0}) * weight[width - 1 - by];
        of_weights[static_cast<std::size_t>(width - 1 - by)] = (kept * delayed(x, by)).sum(at::IntArrayRef({0, 1}));
    }
    dx = sum;
    dweight = at::stack(of_weights);
}
const Formula<"aclnnMaskedCausalConv1dBackward", causal_conv_grad> convolution_backward;

using Ints = std::vector<std::int64_t>;

// The start of every block of all sequences, which end at `ends`.
Ints blocks_of(const Ints& ends, std::int64_t size, std::int64_t stride, std::int64_t tokens) {
    Ints found;
    std::int64_t first = 0;
    for (const auto end : ends) {
        TORCH_CHECK(end >= first && end <= tokens, "a sequence ends at ", end, " of ", tokens, " tokens");
        for (auto begin = first; begin + size <= end; begin += stride) found.push_back(begin);
        first = end;
    }
    return found;
}

void require_compressed(const Tensor& x, const Tensor& weight, const std::string& layout, std::int64_t size,
                        std::int64_t stride, std::int64_t type) {
    TORCH_CHECK(layout == "TND" && type == 0, "the host NPU compresses the layout TND by ends of sequences only");
    require_shapes({{"input", x.sizes(), "T N D"}, {"weight", weight.sizes(), std::to_string(size) + " N"}});
    TORCH_CHECK(stride > 0 && stride % 16 == 0 && stride <= size, "compressStride is ", stride,
                "; CANN takes the multiples of 16 up to compressBlockSize, ", size);
}

// Combines the tokens of a block, weighted per head, into one.
void compress(const Tensor& x, const Tensor& weight, const Ints& ends, const std::string& layout, std::int64_t size,
              std::int64_t stride, std::int64_t type, const Out& out) {
    require_compressed(x, weight, layout, size, stride, type);
    std::vector<Tensor> rows;
    for (const auto begin : blocks_of(ends, size, stride, x.size(0))) {
        rows.push_back((x.slice(0, begin, begin + size) * weight.unsqueeze(-1)).sum(0));
    }
    if (!rows.empty()) out = at::stack(rows);
}
const TensorRule kBlockWeight{"weight", as("input"), "W%16<=128 N"};
const Formula<"aclnnNsaCompress", compress> compressed_blocks{
    {"input", kHalves, "T N<=128 D%16<=256"}, kBlockWeight, {"output", as("input"), "* N D"}};

void compress_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const Ints& ends, std::int64_t size,
                   std::int64_t stride, std::int64_t type, const std::string& layout, const Out& dx,
                   const Out& dweight) {
    require_compressed(x, weight, layout, size, stride, type);
    auto of_x = at::zeros_like(x), of_weight = at::zeros_like(weight);
    const auto blocks = blocks_of(ends, size, stride, x.size(0));
    require_shapes({{"outputGrad", dy.sizes(), std::to_string(blocks.size()) + " * *"}});
    std::int64_t row = 0;
    for (const auto begin : blocks) {
        const auto grad = dy[row++].unsqueeze(0);
        of_x.slice(0, begin, begin + size).add_(grad * weight.unsqueeze(-1));
        of_weight.add_((grad * x.slice(0, begin, begin + size)).sum(-1));
    }
    dx = of_x;
    dweight = of_weight;
}
const Formula<"aclnnNsaCompressGrad", compress_grad> compressed_blocks_backward{
    {"outputGrad", as("input"), "* N D"},
    {"input", kHalves, "T N<=128 D%16<=256"},
    kBlockWeight,
    {"inputGradOut", as("input"), "T N D"},
    {"weightGradOut", as("input"), "W N"}};

}  // namespace
}  // namespace host_npu
