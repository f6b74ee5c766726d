// Mixtures of experts: a row per choice of a token, ordered by expert, and the sums of each token's rows.
#include <limits>

#include "host_npu_formulas/experts.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

using Ints = std::vector<std::int64_t>;

void require_tokens(const Tensor& x, const Tensor& experts) {
    TORCH_CHECK(x.dim() == 2 && experts.dim() == 2 && experts.size(0) == x.size(0), "x of shape ", x.sizes(),
                " and expert_idx of shape ", experts.sizes(), " must have one row per token each");
}

// `rows` numbers the k-th choices of all tokens consecutively.
void init_routing(const AnyTensor& x, const IntegerTensor& rows, const IntegerTensor& experts, std::int64_t active,
                  const Out& expanded, const Out& places, const Out& sorted_experts) {
    require_tokens(x, experts);
    TORCH_CHECK(rows.sizes() == experts.sizes(), "row_idx has shape ", rows.sizes(), " instead of ", experts.sizes());
    require_indices("rowIdx", rows, rows.numel());
    const auto flat = experts.flatten();
    const auto order = stable_order(flat);
    const auto sorted_rows = rows.flatten().index({order});
    const auto count = std::min(active, x.size(0)) * experts.size(1);
    expanded = x.index({sorted_rows.slice(0, 0, count).remainder(x.size(0))});
    places = stable_order(sorted_rows);
    sorted_experts = flat.index({order});
}
const Formula<"aclnnMoeInitRouting", init_routing> routing_by_columns{
    {"x", kFloats, "N H"},
    {"rowIdx", {ACL_INT32}, "N K"},
    {"expertIdx", {ACL_INT32}, "N K"},
    {"expandedXOut", kFloats, "* H"},
    {"expandedRowIdxOut", {ACL_INT32}, "*"},
    {"expandedExpertIdxOut", {ACL_INT32}, "*"},
};

// The choices of all tokens, sorted by expert; choices of inactive experts come last.
struct Choices {
    Tensor order, active, counts;
    std::int64_t choices, first, last;

    Choices(const IntegerTensor& experts, std::int64_t expert_num, const Ints& range)
        : choices(experts.size(1)), first(range.empty() ? 0 : range[0]), last(range.empty() ? expert_num : range[1]) {
        TORCH_CHECK((range.empty() || range.size() == 2) && first >= 0 && first < last && last <= expert_num,
                    "active_expert_range is ", at::IntArrayRef(range), " of ", expert_num, " experts");
        require_indices("expertIdx", experts, expert_num);
        const auto flat = experts.flatten().to(at::kLong);
        active = flat.ge(first).logical_and(flat.lt(last));
        // Inactive choices last: experts after the range, then those before it.
        order = stable_order(at::where(flat.ge(first), flat, std::numeric_limits<std::int32_t>::max()));
        const auto numbers = at::arange(first, last, flat.options());
        counts = flat.unsqueeze(0).eq(numbers.unsqueeze(1)).sum(1);
    }

    // The position of each choice in the order.
    Tensor places() const { return stable_order(order); }
    // The number of active choices; `of` for meta tensors.
    std::int64_t count(std::int64_t of) const {
        return order.is_meta() ? of : std::min(of, counts.sum().item<std::int64_t>());
    }
};

// Writes the first `count` rows; the others are unchanged.
void assign_rows(const Out& out, const Tensor& rows, std::int64_t count) {
    TORCH_CHECK(out.sizes() == rows.sizes(), "an output has shape ", out.sizes(), " instead of ", rows.sizes());
    out.in_place().slice(0, 0, count).copy_(rows.slice(0, 0, count));
}

// Tokens per expert: cumulative (0), counts (1), or pairs of an expert with rows and its count, then zeros (2).
Tensor numbers_of_tokens(const Choices& by, std::int64_t type, std::int64_t expert_num) {
    if (type == 0) return by.counts.cumsum(0);
    if (type == 1) return by.counts;
    TORCH_CHECK(type == 2, "expert_tokens_num_type is ", type, " instead of 0, 1 or 2");
    const auto experts = at::arange(by.first, by.last, by.counts.options());
    const auto pairs = at::stack({experts, by.counts}, 1) * by.counts.gt(0).unsqueeze(1);
    const auto first = pairs.index({stable_order(by.counts.eq(0))});
    return at::cat({first, at::zeros({expert_num - first.size(0), 2}, first.options())});
}

constexpr std::int64_t kNotQuantized = -1;
constexpr std::int64_t kStatic = 0;
constexpr std::int64_t kDynamic = 1;

struct Expanded {
    Tensor rows;
    OptionalTensor scale;
};

// The rows of the tokens, quantized if requested, and their scales.
Expanded expanded_rows(const AnyTensor& x, const IntegerTensor& experts, const OptionalTensor& scale,
                       const OptionalTensor& offset, std::int64_t mode, const Choices& by, const Tensor& order) {
    const auto tokens = order.div(by.choices, "trunc");
    const auto rows = x.index({tokens});
    if (mode == kNotQuantized) {
        TORCH_CHECK(!scale || (scale->dim() == 1 && scale->size(0) == x.size(0)),
                    "scale must have one element for each token");
        return {rows, scale ? OptionalTensor(scale->index({tokens})) : std::nullopt};
    }
    TORCH_CHECK(x.is_floating_point(), "the host NPU quantizes rows of floats, not of ", x.scalar_type());
    if (mode == kStatic) {
        TORCH_CHECK(scale && offset && scale->numel() == 1 && offset->numel() == 1,
                    "a static quantization needs a scale and an offset of one element each");
        return {saturated(widened(rows) * *scale + *offset, at::kChar), std::nullopt};
    }
    TORCH_CHECK(mode == kDynamic, "the host NPU has the quant modes -1, 0 and 1 only, not ", mode);
    auto smoothed = widened(rows);
    if (scale) {
        TORCH_CHECK(scale->dim() == 2 && (scale->size(0) == 1 || scale->size(0) == by.last - by.first) &&
                        scale->size(1) == x.size(1),
                    "scale of shape ", scale->sizes(), " must have one row per active expert");
        const auto expert = experts.flatten().index({order}).to(at::kLong) - by.first;
        const auto in_range = expert.clamp(0, by.last - by.first - 1);
        smoothed = smoothed * (scale->size(0) == 1 ? *scale : scale->index({in_range}));
    }
    const auto [quantized, row_scale] = quantized_rows(smoothed);
    return {quantized, row_scale};
}

// Each expert gets `capacity` rows: excess rows are dropped, missing ones are 0.
void pad_experts(const AnyTensor& x, const Choices& by, std::int64_t expert_num, std::int64_t capacity,
                 const IntegerTensor& experts, const Out& expanded, const Out& places) {
    TORCH_CHECK(by.first == 0 && by.last == expert_num, "a padded routing has all experts active");
    TORCH_CHECK(capacity > 0, "expert_capacity is ", capacity);
    const auto flat = experts.flatten().to(at::kLong);
    const auto within = by.places() - (by.counts.cumsum(0) - by.counts).index({flat});
    const auto room = expert_num * capacity;
    const auto slot = at::where(within.lt(capacity), flat * capacity + within, room);
    auto rows = at::zeros({room + 1, x.size(1)}, x.options());
    const auto tokens = at::arange(flat.size(0), flat.options()).div(by.choices, "trunc");
    rows.index_put_({slot}, x.index({tokens}));
    expanded = rows.slice(0, 0, room).view({expert_num, capacity, x.size(1)});
    places = at::where(slot.lt(room), slot, -1);
}

void init_routing_v3(const AnyTensor& x, const IntegerTensor& experts, const OptionalTensor& scale,
                     const OptionalTensor& offset, std::int64_t active_num, std::int64_t capacity,
                     std::int64_t expert_num, std::int64_t drop_pad_mode, std::int64_t numbers_type, bool with_numbers,
                     std::int64_t quant_mode, const Ints& range, std::int64_t row_idx_type, const Out& expanded,
                     const Out& places, const OptionalOut& numbers, const OptionalOut& scale_out) {
    require_tokens(x, experts);
    const auto total = experts.numel();
    TORCH_CHECK(active_num <= 0 || active_num >= total, "the host NPU routes all choices, not ", active_num, " of ",
                total);
    TORCH_CHECK(row_idx_type == 0 || row_idx_type == 1, "row_idx_type is ", row_idx_type, " instead of 0 or 1");
    const Choices by(experts, expert_num, range);
    if (with_numbers) *numbers = numbers_of_tokens(by, numbers_type, expert_num);
    if (drop_pad_mode == 1) {
        TORCH_CHECK(quant_mode == kNotQuantized && row_idx_type == 0 && !scale,
                    "the host NPU pads experts without quantization and with row_idx_type 0 only");
        pad_experts(x, by, expert_num, capacity, experts, expanded, places);
        return;
    }
    TORCH_CHECK(drop_pad_mode == 0, "drop_pad_mode is ", drop_pad_mode, " instead of 0 or 1");
    const auto count = by.count(total);
    const auto [rows, row_scale] = expanded_rows(x, experts, scale, offset, quant_mode, by, by.order);
    assign_rows(expanded, rows, count);
    if (row_scale && scale_out) assign_rows(*scale_out, *row_scale, count);
    places = row_idx_type == 0 ? at::where(by.active, by.places(), -1) : by.order;
}
const Formula<"aclnnMoeInitRoutingV3", init_routing_v3> routing_by_rows{
    {"x", kFloats | Dtypes{ACL_INT8}, "N H"},
    {"expertIdx", {ACL_INT32}, "N K"},
    {"scaleOptional", kFloat},
    {"offsetOptional", kFloat},
    {"expandedXOut", as("x") | Dtypes{ACL_INT8}, "* H | E C H"},
    {"expandedRowIdxOut", {ACL_INT32}},
    {"expertTokensCountOrCumsumOut", {ACL_INT64}, "* | * 2"},
    {"expandedScaleOut", kFloat},
};

// The values of `drop_pad_mode` differ in the order of `places` and in whether experts have a capacity.
bool is_by_columns(std::int64_t mode) {
    TORCH_CHECK(mode >= 0 && mode <= 3, "drop_pad_mode is ", mode, " instead of 0 to 3");
    return mode < 2;
}

// The weighted sum of a token's rows, with terms added to each row or to the sum. A place of -1 is no row.
void finalize_routing_v2(const Tensor& expanded, const IntegerTensor& places, const OptionalTensor& skip1,
                         const OptionalTensor& skip2, const OptionalTensor& bias, const OptionalTensor& scales,
                         const OptionalIntegerTensor& experts, std::int64_t mode, const Out& out) {
    const auto tokens = out.sizes()[0];
    TORCH_CHECK(places.dim() == 1 && tokens > 0 && places.size(0) % tokens == 0, "expanded_src_to_dst_row of shape ",
                places.sizes(), " must have the same number of rows for each of ", tokens, " tokens");
    const auto choices = places.size(0) / tokens;
    const auto wide = places.to(at::kLong);
    const auto rows = is_by_columns(mode) ? wide.view({choices, tokens}).t() : wide.view({tokens, choices});
    const auto flat = expanded.dim() == 3 ? expanded.flatten(0, 1) : expanded;
    auto each = flat.index({rows.clamp_min(0)}) * rows.ge(0).unsqueeze(-1);
    if (bias) {
        TORCH_CHECK(experts && experts->sizes() == rows.sizes(), "a bias needs the expert of each row");
        require_indices("expertIdx", *experts, bias->size(0));
        each = each + bias->index({experts->to(at::kLong)});
    }
    if (scales) {
        TORCH_CHECK(scales->sizes() == rows.sizes(), "scales has shape ", scales->sizes(), " instead of ",
                    rows.sizes());
        each = each * scales->unsqueeze(-1);
    }
    auto sum = each.sum(1);
    if (skip1) sum = sum + *skip1;
    out = skip2 ? sum + *skip2 : sum;
}
const TensorRules kFinalized{
    {"expandedX", kFloats, "* H | * * H"},     {"expandedRowIdx", {ACL_INT32}, "*"},
    {"x1Optional", as("expandedX"), "N H"},    {"x2Optional", as("expandedX"), "N H"},
    {"biasOptional", as("expandedX"), "* H"},  {"scalesOptional", kFloats, "N K"},
    {"expertIdxOptional", {ACL_INT32}, "N K"}, {"out", as("expandedX"), "N H"},
};
const Formula<"aclnnMoeFinalizeRoutingV2", finalize_routing_v2> sums_by_mode{kFinalized};

void finalize_routing(const Tensor& expanded, const OptionalTensor& skip1, const OptionalTensor& skip2,
                      const OptionalTensor& bias, const OptionalTensor& scales, const IntegerTensor& places,
                      const OptionalIntegerTensor& experts, const Out& out) {
    finalize_routing_v2(expanded, places, skip1, skip2, bias, scales, experts, 0, out);
}
const Formula<"aclnnMoeFinalizeRouting", finalize_routing> sums_by_columns{
    {"expandedX", kFloats, "* H"},
    {"x1", as("expandedX"), "N H"},
    {"x2Optional", as("expandedX"), "N H"},
    {"bias", as("expandedX"), "* H"},
    {"scales", as("expandedX"), "N K"},
    {"expandedRowIdx", {ACL_INT32}, "*"},
    {"expandedExpertIdx", {ACL_INT32}, "N K"},
    {"out", as("expandedX"), "N H"},
};

void finalize_routing_v4(const Tensor& expanded, const IntegerTensor& places, const OptionalTensor& skip1,
                         const OptionalTensor& skip2, const OptionalTensor& bias, const OptionalTensor& scales,
                         const OptionalIntegerTensor& experts, Without<"x">, Without<"alpha1">, Without<"alpha2">,
                         Without<"v">, std::int64_t mode, const Ints& zeros, const Ints& copies, const Ints& constants,
                         std::int64_t, const Out& out) {
    TORCH_CHECK(zeros.empty() && copies.empty() && constants.empty(),
                "the host NPU has no zero, copy or constant experts");
    finalize_routing_v2(expanded, places, skip1, skip2, bias, scales, experts, mode, out);
}
const Formula<"aclnnMoeFinalizeRoutingV4", finalize_routing_v4> sums_of_plain_experts{kFinalized};

// Counts the rows for experts up to and including each expert.
void compute_expert_tokens(const IntegerTensor& sorted_experts, std::int64_t expert_num, const Out& out) {
    const auto experts = at::arange(expert_num, sorted_experts.options());
    out = at::searchsorted(sorted_experts, experts, false, /*right=*/true);
}
const Formula<"aclnnMoeComputeExpertTokens", compute_expert_tokens> ends_of_experts;

// Reorders rows from rank-major (ordered by expert within each rank) to the order of the experts.
void re_routing(const AnyTensor& tokens, const IntegerTensor& counts, const OptionalAnyTensor& scales,
                std::int64_t numbers_type, std::int64_t index_type, const Out& permuted, const OptionalOut& scales_out,
                const Out& index, const Out& numbers) {
    TORCH_CHECK(counts.dim() == 2, "expert_token_num_per_rank has ", counts.dim(), " dimensions instead of 2");
    TORCH_CHECK(numbers_type == 0 || numbers_type == 1, "expert_token_num_type is ", numbers_type,
                " instead of 0 or 1");
    TORCH_CHECK(index_type == 0 || index_type == 1, "idx_type is ", index_type, " instead of 0 or 1");
    const auto rows = tokens.size(0), experts = counts.size(1);
    const auto ends = counts.flatten().to(at::kLong).cumsum(0);
    TORCH_CHECK(counts.is_meta() || counts.numel() == 0 || ends[-1].item<std::int64_t>() == rows,
                "the sum of expert_token_num_per_rank is not the number of tokens, ", rows);
    const auto cells = at::searchsorted(ends, at::arange(rows, ends.options()), false, /*right=*/true);
    const auto order = stable_order(cells.remainder(experts));
    permuted = tokens.index({order});
    if (scales && scales_out) *scales_out = scales->index({order}).reshape(scales_out->sizes());
    index = index_type == 0 ? order : stable_order(order);
    const auto of_experts = counts.sum(0);
    numbers = numbers_type == 1 ? of_experts : of_experts.cumsum(0);
}
const Formula<"aclnnMoeReRouting", re_routing> order_of_experts{
    {"tokens", kHalves | Dtypes{ACL_INT8}, "A H<=16383"},
    {"expertTokenNumPerRank", kIndices, "N E"},
    {"perTokenScalesOptional", kFloat},
    {"permuteTokensOut", kHalves | Dtypes{ACL_INT8}, "A H"},
    {"permutePerTokenScalesOut", kFloat},
    {"permuteTokenIdxOut", {ACL_INT32}, "A"},
    {"expertTokenNumOut", as("expertTokenNumPerRank"), "E"},
};

}  // namespace
}  // namespace host_npu
