// RotaryPositionEmbedding: rotates pairs of elements of the last dimension.
#include "host_npu_formulas/rotary.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "opapi/chip.h"

namespace host_npu {
namespace {

// Rotates pairs by 90 degrees; the transpose is the negative. Pairs span the halves (mode 0) or are neighbors (1).
Tensor turned(const Tensor& x, std::int64_t mode) {
    TORCH_CHECK(mode == 0 || mode == 1, "the host NPU has modes 0 (half) and 1 (interleave) only, not ", mode);
    TORCH_CHECK(x.size(-1) % 2 == 0, "the last dimension has ", x.size(-1), " elements; the number must be even");
    if (mode == 0) {
        const auto halves = x.chunk(2, -1);
        return at::cat({-halves[1], halves[0]}, -1);
    }
    const auto pairs = x.unflatten(-1, {-1, 2});
    return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

}  // namespace

Tensor rotated_sorted(const Tensor& x, const Tensor& cos, const Tensor& sin) {
    TORCH_CHECK(x.size(-1) % 2 == 0, "the last dimension has ", x.size(-1), " elements; the number must be even");
    const auto sorted = x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
    return sorted * cos + turned(sorted, 0) * sin;
}

namespace {

// The last dimension is rotated. cos and sin have size 1 for heads, batches or both.
constexpr const char* kRotated = "A B C D%2<=1024 | T N D%2<=1024";
constexpr const char* kAngles =
    "A B C D | 1 B C D | A 1 C D | A B 1 D | 1 1 C D | 1 B 1 D | A 1 1 D | 1 1 1 D | T N D | T 1 D";
const TensorRules kRotary{
    {"x", kFloats, kRotated}, {"cos", as("x"), kAngles}, {"sin", as("x"), kAngles}, {"out", as("x"), kRotated}};

// cos and sin must have the same shape.
void require_angles(const Tensor& cos, const Tensor& sin) {
    require_shapes({{"cos", cos.sizes(), "...cos"}, {"sin", sin.sizes(), "...cos"}});
}

// Chips before the Ascend950 only rotate smaller heads, and neighbors only by angles that depend on the position alone.
void require_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, std::int64_t mode) {
    require_angles(cos, sin);
    if (soc() == Soc::Ascend950) return;
    TORCH_CHECK(x.size(-1) < 896, "heads have ", x.size(-1), " elements; CANN rotates fewer than 896 on this chip");
    const auto ones = std::ranges::count(cos.sizes().slice(0, cos.dim() - 1), 1);
    TORCH_CHECK(ones < 3 || std::ranges::count(x.sizes(), 1) > 0, "cos has shape ", cos.sizes(), " and x ", x.sizes(),
                "; on this chip, CANN takes the same angles for all positions only if there is one");
    TORCH_CHECK(cos.dim() < 4 || ones != 1 || cos.size(0) != 1 || x.size(0) == 1, "cos has shape ", cos.sizes(),
                " and x ", x.sizes(),
                "; on this chip, CANN takes one batch of angles only if it is for all heads, too");
    TORCH_CHECK(mode == 0 || cos.dim() < 4 || ones >= 2, "cos has shape ", cos.sizes(),
                " in the mode interleave; on this chip, CANN takes 11SD, 1S1D or S11D, of the layout of x");
}

void rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, std::int64_t mode, const Out& out) {
    require_rotary(x, cos, sin, mode);
    out = x * cos + turned(x, mode) * sin;
}
const Formula<"aclnnRotaryPositionEmbedding", rotary> rotary_forward{kRotary};

// `rotate` is a matrix that rotates the pairs, in place of a mode.
void rotary_by(const Tensor& x, const Tensor& cos, const Tensor& sin, std::int64_t mode, const OptionalTensor& rotate,
               const Out& out) {
    require_rotary(x, cos, sin, mode);
    out = x * cos + (rotate ? x.matmul(*rotate) : turned(x, mode)) * sin;
}
const Formula<"aclnnRotaryPositionEmbeddingV2", rotary_by> rotary_forward_by{{"x", kFloats, kRotated},
                                                                             {"cos", as("x"), kAngles},
                                                                             {"sin", as("x"), kAngles},
                                                                             {"rotateOptional", as("x"), "D D"},
                                                                             {"out", as("x"), kRotated}};

void rotary_grad(const Tensor& dy, const Tensor& cos, const Tensor& sin, const OptionalTensor& x, std::int64_t mode,
                 const Out& dx, const Out& dcos, const Out& dsin) {
    require_rotary(dy, cos, sin, mode);
    dx = dy * cos - turned(dy * sin, mode);
    if (!x) return;
    dcos = (dy * *x).sum_to_size(cos.sizes());
    dsin = (dy * turned(*x, mode)).sum_to_size(sin.sizes());
}
const Formula<"aclnnRotaryPositionEmbeddingGrad", rotary_grad> rotary_backward{
    {"dy", kFloats, kRotated},        {"cos", as("dy"), kAngles},   {"sin", as("dy"), kAngles},
    {"xOptional", kFloats, kRotated}, {"dxOut", kFloats, kRotated}, {"dcosOut", kFloats, kAngles},
    {"dsinOut", kFloats, kAngles},
};

// Chips before the Ascend950 only rotate halves, of two head sizes, in two layouts, by angles per token.
void require_tokens(const Out& query, const Out& key, const Tensor& cos, std::int64_t layout, const std::string& mode) {
    if (soc() == Soc::Ascend950) return;
    constexpr std::array names{"BSND", "SBND", "BNSD", "TND"};
    TORCH_CHECK(layout == 1 || layout == 4, "layout is ",
                layout == 2 || layout == 3 ? names[static_cast<std::size_t>(layout - 1)] : std::to_string(layout),
                "; CANN takes BSND and TND on this chip");
    TORCH_CHECK(mode == "half", "rotaryMode is ", mode, "; CANN takes half on this chip");
    const auto q = query.rounded(), k = key.rounded();
    const std::string tokens = layout == 1 ? "B S" : "T";
    require_shapes({{"queryRef", q.sizes(), tokens + " N D"},
                    {"keyRef", k.sizes(), tokens + " M D"},
                    {"cos", cos.sizes(), tokens + " 1 E"}});
    TORCH_CHECK(q.size(-1) == 64 || q.size(-1) == 128, "heads have ", q.size(-1),
                " elements; CANN rotates 64 or 128 on this chip");
}

// Works for all layouts: cos and sin have size 1 in place of the heads.
void apply_rotary(const Out& query, const Out& key, const Tensor& cos, const Tensor& sin, std::int64_t layout,
                  const std::string& mode) {
    require_tokens(query, key, cos, layout, mode);
    TORCH_CHECK(mode == "half" || mode == "interleave",
                "the host NPU has the rotary modes half and interleave only, not ", mode);
    for (const auto& each : {query, key}) {
        const auto x = each.rounded();
        TORCH_CHECK(x.size(-1) == cos.size(-1), "the host NPU rotates whole heads only: of ", x.size(-1),
                    " elements, not ", cos.size(-1));
        each = x * cos + turned(x, mode == "half" ? 0 : 1) * sin;
    }
}
const Formula<"aclnnApplyRotaryPosEmbV2", apply_rotary> rotary_in_place{
    {"queryRef", kFloats, "A B C D<=1024 | T N D<=1024"},
    {"keyRef", as("queryRef"), "* * * D | * * D"},
    {"cos", as("queryRef"), "...c"},
    {"sin", as("queryRef"), "...c"},
};

void interleave_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Out& out) {
    require_angles(cos, sin);
    out = rotated_sorted(x, cos, sin);
}
const Formula<"aclnnInterleaveRope", interleave_rope> rotary_of_sorted{
    {"x", kHalves, "B N S 64"},
    {"cos", as("x"), "B 1 S 64 | B 1 1 64"},
    {"sin", as("x"), "B 1 S 64 | B 1 1 64"},
    {"y", kHalves, "B N S 64"},
};

// The cosines and sines of tokens: rows of the cache. With sections, which have their own positions, parts of several
// rows are concatenated or interleaved.
std::vector<Tensor> angles_of(const Tensor& positions, const Tensor& cache, const std::vector<std::int64_t>& sections,
                              bool by_turns) {
    const auto rows = cache.index_select(0, positions.to(at::kLong).flatten());
    if (positions.dim() == 1) {
        for (const auto each : sections) TORCH_CHECK(each == 0, "mropeSection needs positions for each section");
        return rows.chunk(2, -1);
    }
    using Sections = std::vector<std::int64_t>;
    static const std::vector<Sections> allowed{{16, 24, 24}, {24, 20, 20}, {8, 12, 12}, {16, 16, 16, 16}};
    const auto count = soc() == Soc::Ascend950 ? 2 : 4;
    TORCH_CHECK(std::find(allowed.begin(), allowed.begin() + count, sections) != allowed.begin() + count,
                "mropeSection is ", at::IntArrayRef(sections),
                "; CANN takes [16, 24, 24] and [24, 20, 20], and besides, except on Ascend950, [8, 12, 12] and "
                "[16, 16, 16, 16]");
    TORCH_CHECK(std::cmp_equal(sections.size(), positions.size(0)), "positions has shape ", positions.sizes(), " for ",
                sections.size(), " sections");
    TORCH_CHECK(std::accumulate(sections.begin(), sections.end(), std::int64_t{0}) * 2 == cache.size(-1),
                "cosSinCache has rows of ", cache.size(-1), " elements instead of twice the sum of mropeSection, ",
                at::IntArrayRef(sections));
    std::vector<Tensor> angles;
    TORCH_CHECK(!by_turns || sections.size() == 3, "cache_mode interleave takes 3 sections, not ", sections.size());
    for (const auto& half : rows.unflatten(0, {positions.size(0), -1}).chunk(2, -1)) {
        if (by_turns) {
            const auto turns = half[0].clone();
            for (const std::int64_t of : {1, 2}) {
                turns.slice(1, of, 3 * sections[1], 3).copy_(half[of].slice(1, of, 3 * sections[1], 3));
            }
            angles.push_back(turns);
            continue;
        }
        std::vector<Tensor> parts = half.split_with_sizes(sections, -1);
        for (std::size_t index = 0; index < parts.size(); ++index) {
            parts[index] = parts[index].select(0, static_cast<std::int64_t>(index));
        }
        angles.push_back(at::cat(parts, -1));
    }
    return angles;
}

// A row of `cache` has the cosines and then the sines of a position. They rotate the first part of each head.
void rope_with_cache(const IntegerTensor& positions, const Tensor& query, const Tensor& key, const Tensor& cache,
                     const std::vector<std::int64_t>& sections, std::int64_t head_size, bool halves,
                     std::int64_t cache_mode, const Out& query_out, const Out& key_out) {
    const auto unit = query_out.dtype() == at::kFloat ? 16 : 32;
    TORCH_CHECK(head_size > 0 && head_size % unit == 0, "head_size is ", head_size, "; CANN takes multiples of ", unit,
                " for ", query_out.dtype());
    TORCH_CHECK(cache.size(-1) % unit == 0 && cache.size(-1) <= head_size, "cosSinCache has rows of ", cache.size(-1),
                " elements; CANN takes multiples of ", unit, " up to head_size, ", head_size);
    const auto angles = angles_of(positions, cache, sections, cache_mode == 1);
    const auto each_of_a_pair = [&](const Tensor& x) {
        return (halves ? at::cat({x, x}, -1) : at::stack({x, x}, -1).flatten(-2)).unsqueeze(1);
    };
    const auto cos = each_of_a_pair(angles[0]), sin = each_of_a_pair(angles[1]);
    const auto rotated = [&](const Tensor& x) {
        const auto heads = x.unflatten(-1, {-1, head_size});
        const auto parts = heads.split_with_sizes({cos.size(-1), head_size - cos.size(-1)}, -1);
        return at::cat({parts[0] * cos + turned(parts[0], halves ? 0 : 1) * sin, parts[1]}, -1).flatten(-2);
    };
    query_out = rotated(query);
    key_out = rotated(key);
}
const Formula<"aclnnRopeWithSinCosCacheV2", rope_with_cache> rotary_of_positions{
    {"positions", {ACL_INT64}, "T | 3 T | 4 T"}, {"queryIn", kFloats, "T Q"},  {"keyIn", as("queryIn"), "T K"},
    {"cosSinCache", as("queryIn"), "P R"},       {"queryOut", kFloats, "T Q"}, {"keyOut", kFloats, "T K"},
};

}  // namespace
}  // namespace host_npu
