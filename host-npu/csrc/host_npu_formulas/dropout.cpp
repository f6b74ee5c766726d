// Dropout: a mask determined by seed and offset, and its application.
#include "host_npu_formulas/dropout.h"

#include <ATen/CPUGeneratorImpl.h>

namespace host_npu {
namespace {

constexpr std::int64_t kBits = 8;
// The number of bits of a mask is a multiple of this.
constexpr std::int64_t kAlignment = 128;

Tensor values_of_bits(const Tensor& like) {
    return at::arange(kBits, like.options().dtype(at::kInt)).exp2().to(at::kInt);
}

// Hashes seed and offset, because torch's CPU generator uses only 32 bits of a seed.
std::uint64_t mixed(std::int64_t seed, std::int64_t offset) {
    auto bits = static_cast<std::uint64_t>(seed) + 0x9E3779B97F4A7C15 * (static_cast<std::uint64_t>(offset) + 1);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
    return (bits ^ (bits >> 31)) & 0xFFFFFFFF;
}

void require_probability(double probability) {
    TORCH_CHECK(probability >= 0 && probability <= 1, "the probability of dropout is ", probability,
                ", which is not in 0 to 1");
}

// Draws a mask, reproducibly by seed, but not with the device's generator. Without a seed, only the shape is valid.
Tensor drawn(std::int64_t count, double probability, std::optional<std::uint64_t> seed, const Tensor& like) {
    require_probability(probability);
    const auto bits = (count + kAlignment - 1) / kAlignment * kAlignment;
    const auto options = like.options().dtype(at::kFloat);
    const auto random = seed && !like.is_meta() ? at::rand({bits}, at::detail::createCPUGenerator(*seed), options)
                                                : at::rand({bits}, options.device(at::kMeta));
    const auto kept = random.ge(probability).view({-1, kBits});
    return (kept * values_of_bits(like)).sum(-1).to(at::kByte);
}

void draw_mask(const std::vector<std::int64_t>& shape, double probability, std::optional<std::uint64_t> seed,
               const Out& mask) {
    std::int64_t count = 1;
    for (const auto size : shape) count *= size;
    mask = drawn(count, probability, seed, mask.rounded()).view(mask.sizes());
}

void gen_mask(const std::vector<std::int64_t>& shape, double probability, std::int64_t seed, std::int64_t offset,
              std::int32_t, const Out& mask) {
    draw_mask(shape, probability, mixed(seed, offset), mask);
}
const Formula<"aclnnDropoutGenMaskV2", gen_mask> mask_of_dropout{
    {"out", {ACL_UINT8}, "*"},
};

// The version for captured graphs, which reads seed and offset from memory that is set before every replay.
void gen_mask_by_tensors(const std::vector<std::int64_t>& shape, double probability, const IntegerTensor& seed,
                         const IntegerTensor& offset_of_graph, std::int64_t offset, std::int32_t, const Out& mask) {
    TORCH_CHECK(seed.numel() == 1 && offset_of_graph.numel() == 1, "seed and offset of dropout have ", seed.numel(),
                " and ", offset_of_graph.numel(), " elements instead of one");
    std::optional<std::uint64_t> value;
    if (!seed.is_meta()) value = mixed(seed.item<std::int64_t>(), offset_of_graph.item<std::int64_t>() + offset);
    draw_mask(shape, probability, value, mask);
}
const Formula<"aclnnDropoutGenMaskV2Tensor", gen_mask_by_tensors> mask_of_dropout_in_graphs;

void do_mask(const Tensor& x, const IntegerTensor& mask, double probability, const Out& out) {
    require_probability(probability);
    const auto bytes = (x.numel() + kAlignment - 1) / kAlignment * kAlignment / kBits;
    TORCH_CHECK(mask.numel() == bytes, "mask has shape ", mask.sizes(), " instead of [", bytes, "], a bit for each of ",
                x.numel(), " elements in groups of ", kAlignment);
    if (probability == 0) {
        out = x;
    } else if (probability == 1) {
        out = at::zeros_like(x);
    } else {
        out = x * kept_by(mask, x.numel()).view(x.sizes()) / (1 - probability);
    }
}
const Formula<"aclnnDropoutDoMask", do_mask> dropout_by_mask{
    {"self", kFloats, "...x"},
    {"mask", {ACL_UINT8}, "*"},
    {"out", kFloats, "...x"},
};

}  // namespace

Tensor drawn_mask(std::int64_t count, double probability, std::int64_t seed, std::int64_t offset, const Tensor& like) {
    return drawn(count, probability, mixed(seed, offset), like);
}

Tensor kept_by(const Tensor& mask, std::int64_t count) {
    TORCH_CHECK(mask.scalar_type() == at::kByte && mask.numel() * kBits >= count, "a mask of dropout has ",
                mask.numel(), " elements of ", mask.scalar_type(), " instead of the bits of ", count, " in bytes");
    const auto bits = mask.flatten().unsqueeze(-1).to(at::kInt).bitwise_and(values_of_bits(mask));
    return bits.ne(0).flatten().slice(0, 0, count).to(at::kFloat);
}

}  // namespace host_npu
