// Grouped matrix products: each group of rows has its own matrix.
#include <algorithm>
#include <tuple>
#include <utility>

#include "host_npu_formulas/grouped_products.h"
#include "host_npu_formulas/mx_quantization.h"
#include "host_npu_formulas/quantization.h"
#include "opapi/chip.h"

namespace host_npu {
namespace {

void require_activation(std::int64_t type, bool is_quantized) {
    TORCH_CHECK(type == 0 || type == 1 || type == 2 || type == 4 || type == 5,
                "the host NPU has the act types 0, 1, 2, 4 and 5 only, not ", type);
    TORCH_CHECK(type == 0 || is_quantized, "act_type is ", type, "; only products of int8 matrices have an activation");
}

// A valid combination of dtypes. A bias or antiquant_scale may be absent.
struct Combination {
    at::ScalarType x, weight;
    std::vector<at::ScalarType> biases;
    std::optional<at::ScalarType> scale;
    at::ScalarType out;
};

const std::vector<Combination>& combinations() {
    using enum at::ScalarType;
    static const std::vector<Combination> of_a2_and_a3{
        {Float, Float, {Float}, {}, Float},
        {Half, Half, {Half}, {}, Half},
        {BFloat16, BFloat16, {Float}, {}, BFloat16},
        {Half, Char, {Half}, {}, Half},
        {BFloat16, Char, {Float}, {}, BFloat16},
        {Char, Char, {Int}, Long, Char},
        {Char, Char, {Int}, BFloat16, BFloat16},
        {Char, Char, {Int}, Float, Half},
        {Char, Char, {Int}, {}, Int},
    };
    static const std::vector<Combination> of_950{
        {Float, Float, {Float}, {}, Float},
        {Half, Half, {Half, Float}, {}, Half},
        {BFloat16, BFloat16, {BFloat16, Float}, {}, BFloat16},
        {Half, Char, {Half}, {}, Half},
        {BFloat16, Char, {BFloat16, Float}, {}, BFloat16},
        {Char, Char, {Int}, Long, BFloat16},
        {Char, Char, {Int}, Long, Half},
        {Char, Char, {Int, BFloat16, Float}, BFloat16, BFloat16},
        {Char, Char, {Int, BFloat16, Float}, Float, BFloat16},
        {Char, Char, {Int, Half, Float}, Float, Half},
    };
    return soc() == Soc::Ascend950 ? of_950 : of_a2_and_a3;
}

template <class Tensors>
std::optional<at::ScalarType> dtype_of(const Tensors& tensors) {
    return tensors.empty() ? std::nullopt : std::optional(tensors[0].scalar_type());
}

void require_together(const AnyTensor& x, const AnyTensor& weight, std::optional<at::ScalarType> bias,
                      std::optional<at::ScalarType> scale, at::ScalarType out) {
    for (const auto& row : combinations()) {
        const bool has_bias = !bias || std::ranges::find(row.biases, *bias) != row.biases.end();
        if (x.scalar_type() == row.x && weight.scalar_type() == row.weight && has_bias && scale == row.scale &&
            out == row.out) {
            return;
        }
    }
    auto text = "x " + name_of(x.scalar_type()) + ", weight " + name_of(weight.scalar_type());
    if (bias) text += ", bias " + name_of(*bias);
    if (scale) text += ", scale " + name_of(*scale);
    TORCH_CHECK(false, "these dtypes cannot be combined: ", text, ", out ", name_of(out));
}

void require_dtype_of_x(const char* name, const AnyTensor& x, const std::vector<AnyTensor>& tensors) {
    for (const auto& each : tensors) {
        TORCH_CHECK(each.scalar_type() == x.scalar_type(), name, " has dtype ", name_of(each.scalar_type()),
                    " instead of that of x, ", name_of(x.scalar_type()));
    }
}

constexpr std::int64_t kNotSplit = -1;
constexpr std::int64_t kSplitRows = 0;
constexpr std::int64_t kSplitSums = 2;

const TensorRules kGrouped{
    {"x", kFloats | Dtypes{ACL_INT8} | on_950(kBlockNumbers)},
    {"weight", kFloats | Dtypes{ACL_INT8} | on_950(kBlockNumbers)},
    {"biasOptional", kFloats | Dtypes{ACL_INT32}},
    {"scaleOptional", Dtypes{ACL_FLOAT, ACL_BF16, ACL_INT64, ACL_UINT64} | on_950(kBlockScales)},
    {"offsetOptional", kFloat},
    {"antiquantScaleOptional", kHalves},
    {"antiquantOffsetOptional", kHalves},
    {"perTokenScaleOptional", kFloat | on_950(kBlockScales)},
    {"groupListOptional", {ACL_INT64}, "E | E 2"},
    {"activationInputOptional"},
    {"activationQuantScaleOptional"},
    {"activationQuantOffsetOptional"},
    {"out", kFloats | Dtypes{ACL_INT32, ACL_INT8}},
    {"activationFeatureOutOptional"},
    {"dynQuantScaleOutOptional"},
};

// Checks that the product is not quantized, and that no list has more tensors than CANN accepts.
void require_lists(const AnyTensorList& x, const AnyTensorList& weight, const AnyTensorList& bias, std::size_t outs) {
    const auto is_950 = soc() == Soc::Ascend950;
    const std::size_t most = is_950 ? 1024 : 128;
    TORCH_CHECK(x.size() <= most && weight.size() <= most && outs <= most, "x, weight and out are lists of ", x.size(),
                ", ", weight.size(), " and ", outs, " tensors; CANN takes at most ", most);
    for (const auto& each : bias) {
        TORCH_CHECK(is_950 || each.scalar_type() != at::kBFloat16,
                    "biasOptional has dtype bfloat16 instead of float32, float16 or int32");
    }
}

void require_as_many(const char* name, std::size_t count, std::int64_t groups) {
    TORCH_CHECK(count <= 1 || std::cmp_equal(count, groups), name, " is a list of ", count, " tensors for ", groups,
                " groups; CANN takes one for each, or one of all");
}

template <class Function>
TensorList each_of(const AnyTensorList& tensors, const Function& function) {
    TensorList results;
    for (const auto& each : tensors) results.push_back(function(each));
    return results;
}

TensorList offsets_of(const AnyTensorList& scale, const Out& out) {
    return out.dtype() == at::kChar ? each_of(scale, offset_of) : TensorList();
}

template <class Scales>
void require_together(const AnyTensorList& x, const AnyTensorList& weight, const AnyTensorList& bias,
                      const Scales& scale, const std::vector<Out>& outs) {
    TORCH_CHECK(!x.empty() && !weight.empty() && !outs.empty(), "x, weight and the outputs must not be empty");
    for (std::size_t index = 0; index < weight.size(); ++index) {
        require_together(x[std::min(index, x.size() - 1)], weight[index], dtype_of(bias), dtype_of(scale),
                         outs[std::min(index, outs.size() - 1)].dtype());
    }
}

void grouped_by_ends(const AnyTensorList& x, const AnyTensorList& weight, const AnyTensorList& bias,
                     const AnyTensorList& scale, const TensorList& offset, const TensorList& antiquant_scale,
                     const TensorList& antiquant_offset, const Sizes& ends, std::int64_t,
                     const std::vector<Out>& outs) {
    require_together(x, weight, bias, scale, outs);
    const auto is_like_x = [&](const Tensor& each) { return each.is_floating_point() == x[0].is_floating_point(); };
    TORCH_CHECK(
        std::ranges::all_of(weight, is_like_x) && offset.empty() && antiquant_scale.empty() && antiquant_offset.empty(),
        "the host NPU multiplies groups by their ends without an offset and an antiquantization only");
    if (x[0].scalar_type() == at::kChar) {
        TORCH_CHECK(x.size() == 1 && outs.size() == 1, "groups of int8 by their ends have one x and one output");
        const auto scales = each_of(scale, scale_of);
        const GroupOptions options{bias, scales, {}, {}, {}, 0, std::ssize(weight), offsets_of(scale, outs[0])};
        split_rows(x[0], weight, IntegerTensor(at::tensor(ends)), 0, options, outs[0]);
        return;
    }
    TensorList parts(x.begin(), x.end());
    if (!ends.empty()) {
        const auto rows = at::cat(parts);
        TORCH_CHECK(ends.back() == rows.size(0), "the groups have ", ends.back(), " of ", rows.size(0), " rows");
        parts = rows.split_with_sizes(sizes_from_ends(ends));
    }
    const auto matrices = without_batches({weight.begin(), weight.end()});
    TORCH_CHECK(parts.size() == matrices.size(), parts.size(), " groups have ", matrices.size(), " matrices");
    const bool is_of_all = bias.size() == 1 && bias[0].dim() == 2 && std::cmp_equal(bias[0].size(0), parts.size());
    TORCH_CHECK(bias.empty() || bias.size() == parts.size() || is_of_all, bias.size(), " biases for ", parts.size());
    const GroupOptions options{bias, {}, {}, {}, {}, 0, std::ssize(parts)};
    TensorList results;
    for (std::size_t group = 0; group < parts.size(); ++group) {
        results.push_back(group_product(parts[group], matrices[group], static_cast<std::int64_t>(group), 0, options));
    }
    if (outs.size() == 1) results = {at::cat(results)};
    TORCH_CHECK(outs.size() == results.size(), results.size(), " products have ", outs.size(), " outputs");
    for (std::size_t index = 0; index < outs.size(); ++index) outs[index] = results[index];
}
const Formula<"aclnnGroupedMatmul", grouped_by_ends> grouped_by_ints;

// The arguments of all versions. Unread ones control how CANN computes.
struct Grouped {
    AnyTensorList x, weight, bias, scale, offset, antiquant_scale, antiquant_offset;
    TensorList token_scale;
    OptionalIntegerTensor list;
    TensorList activation_input, activation_scale, activation_offset;
    std::int64_t group_type, list_type, activation, group_size;
    std::vector<Out> outs;
    std::vector<Out> unread_outs;
    std::int64_t unread;
    Sizes unread_sizes;
};

// Refuses options that only quantized products have.
void require_grouped(const Grouped& call) {
    const auto& [x, weight, outs] = std::tie(call.x, call.weight, call.outs);
    TORCH_CHECK(call.group_size == 0, "the host NPU has no groups of a quantized product, but got ", call.group_size);
    require_lists(x, weight, call.bias, outs.size());
    TORCH_CHECK(call.offset.empty() && call.activation_input.empty() && call.activation_scale.empty() &&
                    call.activation_offset.empty(),
                "the host NPU multiplies groups without offsets and without inputs of an activation only");
    TORCH_CHECK(!x.empty() && !weight.empty() && !outs.empty(), "x, weight and the outputs must not be empty");
    const bool is_quantized = x[0].scalar_type() == at::kChar;
    require_activation(call.activation, is_quantized);
    require_dtype_of_x("antiquantScaleOptional", x[0], call.antiquant_scale);
    require_dtype_of_x("antiquantOffsetOptional", x[0], call.antiquant_offset);
    require_together(x, weight, call.bias, call.scale, outs);
    TORCH_CHECK(call.token_scale.empty() || (call.token_scale.size() == 1 && is_quantized && !call.scale.empty()),
                "per_token_scale is for products of int8 matrices that have a scale only, as one tensor");
    TORCH_CHECK(!is_quantized || call.group_type == kSplitRows,
                "products of int8 matrices have groups of rows (group_type 0) only, not group_type ", call.group_type);
}

bool has_blocks(const Grouped& call) {
    return !call.scale.empty() && call.scale[0].scalar_type() == at::kFloat8_e8m0fnu;
}

// Grouped products of matrices in blocks of 32 elements with a scale each.
void grouped_blocks(const Grouped& call) {
    require_mx();
    const auto is_one = [](const auto& list) { return list.size() == 1; };
    TORCH_CHECK(
        is_one(call.x) && is_one(call.weight) && is_one(call.scale) && is_one(call.token_scale) && is_one(call.outs) &&
            call.list && call.group_type == kSplitRows && call.weight[0].dim() == 3,
        "the host NPU multiplies blocks as one x of rows in groups (group_type 0), one weight of shape [E, K, N]"
        " and one output, with a scale, a per_token_scale and a group_list");
    require_factors(call.x[0], call.weight[0]);
    TORCH_CHECK(call.bias.empty() && call.activation == 0 && call.outs[0].dtype() != at::kChar,
                "the host NPU multiplies groups of blocks without a bias and an activation, to floats");
    const auto x = from_blocks(call.x[0], call.token_scale[0], 1);
    const AnyTensorList weight{AnyTensor(from_blocks(call.weight[0], call.scale[0], 1))};
    const GroupOptions options{{}, {}, {}, {}, {}, 0, weight[0].size(0)};
    split_rows(x, weight, *call.list, call.list_type, options, call.outs[0]);
}

void grouped(const Grouped& call) {
    if (has_blocks(call)) {
        grouped_blocks(call);
        return;
    }
    require_grouped(call);
    const auto& [x, weight, outs, list] = std::tie(call.x, call.weight, call.outs, call.list);
    const auto type = call.group_type;
    const auto scales = each_of(call.scale, scale_of);
    const auto antiquant_scales = each_of(call.antiquant_scale, widened);
    const auto antiquant_offsets = each_of(call.antiquant_offset, widened);
    const auto groups = weight.size() == 1 && weight[0].dim() == 3 ? weight[0].size(0) : std::ssize(weight);
    require_as_many("biasOptional", call.bias.size(), groups);
    require_as_many("scaleOptional", scales.size(), groups);
    require_as_many("antiquantScaleOptional", antiquant_scales.size(), groups);
    require_as_many("antiquantOffsetOptional", antiquant_offsets.size(), groups);
    const GroupOptions options{call.bias,         scales,          call.token_scale, antiquant_scales,
                               antiquant_offsets, call.activation, groups,           offsets_of(call.scale, outs[0])};
    if (type == kSplitRows && x.size() == 1 && outs.size() == 1) {
        TORCH_CHECK(list, "groups of rows need a group_list");
        split_rows(x[0], weight, *list, call.list_type, options, outs[0]);
        return;
    }
    if (type == kSplitRows && outs.size() == 1) {
        TORCH_CHECK(x[0].scalar_type() != at::kChar, "products of int8 matrices have one x");
        join_rows(x, weight, list, call.list_type, options, outs[0]);
        return;
    }
    if (type == kSplitSums) {
        TORCH_CHECK(list && x.size() == 1 && weight.size() == 1, "groups of columns need a group_list and one matrix");
        const auto sums = split_sums(widened(x[0]), widened(weight[0]), *list, call.list_type);
        outs[0] = at::stack(sums);
        return;
    }
    TORCH_CHECK(type == kNotSplit && x.size() == weight.size() && outs.size() == x.size(),
                "the host NPU has one x and one output for groups, or as many as matrices (group_type -1), not ",
                x.size(), " and ", outs.size(), " with group_type ", type);
    for (std::size_t index = 0; index < x.size(); ++index) {
        outs[index] = group_product(x[index], weight[index], static_cast<std::int64_t>(index), 0, options);
    }
}
constexpr Members<&Grouped::x, &Grouped::weight, &Grouped::bias, &Grouped::scale, &Grouped::offset,
                  &Grouped::antiquant_scale, &Grouped::antiquant_offset, &Grouped::token_scale, &Grouped::list,
                  &Grouped::activation_input, &Grouped::activation_scale, &Grouped::activation_offset, &Grouped::unread,
                  &Grouped::group_type, &Grouped::list_type, &Grouped::activation>
    kGroupedArguments;
constexpr Members<&Grouped::outs, &Grouped::unread_outs, &Grouped::unread_outs> kGroupedOuts;
const Formula<"aclnnGroupedMatmulV4", collected<grouped, kGroupedArguments, kGroupedOuts>> grouped_v4{kGrouped};
const Formula<"aclnnGroupedMatmulV5", collected<grouped, kGroupedArguments, &Grouped::unread_sizes, kGroupedOuts>>
    grouped_v5{kGrouped};
const Formula<"aclnnGroupedMatmulWeightNz",
              collected<grouped, kGroupedArguments, &Grouped::unread_sizes, &Grouped::group_size, kGroupedOuts>>
    grouped_of_tiles{kGrouped};

void grouped_add_v2(const Tensor& x, const Tensor& weight, const IntegerTensor& list, const Out& y, bool transpose_x,
                    bool transpose_weight, std::int64_t group_type, std::int64_t list_type) {
    TORCH_CHECK(group_type == kSplitSums && transpose_x && !transpose_weight,
                "the host NPU adds products of groups of rows with transpose_x only");
    const auto sums = at::stack(split_sums(x.t(), weight, list, list_type));
    y = y.rounded() + sums.view(y.sizes());
}
const Formula<"aclnnGroupedMatmulAddV2", grouped_add_v2> added_products;

void grouped_add(const Tensor& x, const Tensor& weight, const IntegerTensor& list, const Out& y, bool transpose_x,
                 bool transpose_weight, std::int64_t group_type) {
    grouped_add_v2(x, weight, list, y, transpose_x, transpose_weight, group_type, 0);
}
const Formula<"aclnnGroupedMatmulAdd", grouped_add> added_products_by_ends;

}  // namespace
}  // namespace host_npu
