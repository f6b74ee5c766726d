// Products of groups of rows with a matrix each.
#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "host_npu_formulas/formula.h"
#include "host_npu_formulas/mx_quantization.h"
#include "host_npu_formulas/quantization.h"
#include "opapi/chip.h"

namespace host_npu {
namespace {

using TensorList = std::vector<Tensor>;
using Sizes = std::vector<std::int64_t>;

TensorList without_batches(const TensorList& matrices) {
    return matrices.size() == 1 && matrices[0].dim() == 3 ? matrices[0].unbind() : matrices;
}

void assign(const TensorList& results, const std::vector<Out>& outs) {
    if (outs.size() == 1 && results.size() != 1) {
        outs[0] = at::cat(results);
        return;
    }
    TORCH_CHECK(outs.size() == results.size(), results.size(), " products have ", outs.size(), " outputs");
    for (std::size_t index = 0; index < results.size(); ++index) outs[index] = results[index];
}

// Returns the sizes of groups that end at these rows.
Sizes sizes_from_ends(Sizes ends) {
    std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
    for (const auto size : ends) TORCH_CHECK(size >= 0, "the ends of the groups must not decrease");
    return ends;
}

// Multiplies the rows of x, in groups of the given sizes, or the tensors of x if there are no groups.
void products(const TensorList& x, const TensorList& weight, const TensorList& bias, const Sizes& rows,
              const std::vector<Out>& outs) {
    auto parts = x;
    if (!rows.empty()) {
        const auto all = x.size() == 1 ? x[0] : at::cat(x);
        const auto total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
        TORCH_CHECK(total == all.size(0), "the groups have ", total, " of ", all.size(0), " rows");
        parts = all.split_with_sizes(rows);
    }
    const auto matrices = without_batches(weight);
    const auto added = bias.size() == 1 && bias[0].dim() == 2 ? bias[0].unbind() : bias;
    TORCH_CHECK(parts.size() == matrices.size(), parts.size(), " groups have ", matrices.size(), " matrices");
    TORCH_CHECK(added.empty() || added.size() == matrices.size(), added.size(), " biases for ", matrices.size());
    TensorList results;
    for (std::size_t index = 0; index < parts.size(); ++index) {
        const auto product = parts[index].matmul(matrices[index]);
        results.push_back(added.empty() ? product : product + added[index]);
    }
    assign(results, outs);
}

// Which groups have which rows: sums of their sizes (0), their sizes (1), or pairs of a group and its size (2).
struct Groups {
    Sizes numbers, sizes;
};

Groups groups_of(const IntegerTensor& list, std::int64_t type) {
    const auto wide = list.to(at::kLong).contiguous();
    const auto values = [](const Tensor& x) {
        const auto flat = x.contiguous();
        return Sizes(flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel());
    };
    if (type == 2) return {values(wide.select(1, 0)), values(wide.select(1, 1))};
    Sizes numbers(static_cast<std::size_t>(wide.size(0)));
    std::iota(numbers.begin(), numbers.end(), 0);
    return {numbers, type == 0 ? sizes_from_ends(values(wide)) : values(wide)};
}

void require_groups(const Groups& groups, std::int64_t count, std::int64_t rows) {
    for (const auto size : groups.sizes) TORCH_CHECK(size >= 0, "group_list has the negative size ", size);
    for (const auto number : groups.numbers) {
        TORCH_CHECK(number >= 0 && number < count, "group_list has the group ", number, " of ", count);
    }
    std::int64_t left = rows;
    for (const auto size : groups.sizes) {
        TORCH_CHECK(size <= left, "the groups have more than ", rows, " rows");
        left -= size;
    }
}

void require_list(const IntegerTensor& list, std::int64_t type, std::int64_t matrices) {
    TORCH_CHECK(type >= 0 && type <= 2, "group_list_type is ", type, " instead of 0, 1 or 2");
    TORCH_CHECK(list.dim() == (type == 2 ? 2 : 1) && list.size(0) == matrices && (type != 2 || list.size(1) == 2),
                "group_list of shape ", list.sizes(), " does not fit ", matrices, " groups");
}

Tensor activated(const Tensor& x, std::int64_t type) {
    switch (type) {
        case 1:
            return at::relu(x);
        case 2:
            return at::gelu(x, "tanh");
        case 4:
            return x * at::sigmoid(x * 1.702);
        case 5:
            return at::silu(x);
        default:
            return x;
    }
}

void require_activation(std::int64_t type, bool is_quantized) {
    TORCH_CHECK(type == 0 || type == 1 || type == 2 || type == 4 || type == 5,
                "the host NPU has the act types 0, 1, 2, 4 and 5 only, not ", type);
    TORCH_CHECK(type == 0 || is_quantized, "act_type is ", type, "; only products of int8 matrices have an activation");
}

// Dtypes that go together, of which a bias or an antiquant_scale may be absent.
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

// What int8 matrices are multiplied as: sums of integers, exact in float64.
Tensor for_product(const Tensor& x) { return x.is_floating_point() ? widened(x) : x.to(at::kDouble); }

// What is done to the rows of a group.
struct Options {
    const std::vector<AnyTensor>& bias;
    const TensorList& scale;
    const TensorList& token_scale;
    const TensorList& antiquant_scale;
    const TensorList& antiquant_offset;
    std::int64_t activation;
    std::int64_t groups;

    // The numbers of a list that are for a group: those of its own tensor, or of a row of the one.
    Tensor of_group(const TensorList& list, std::int64_t group) const {
        const bool is_of_all = list.size() == 1 && (groups > 1 || list[0].dim() > 1);
        return is_of_all ? list[0][group] : list[static_cast<std::size_t>(group)].squeeze(0);
    }
};

Tensor group_product(const Tensor& rows, const Tensor& weight, std::int64_t group, std::int64_t first,
                     const Options& options) {
    const bool weight_only = rows.is_floating_point() && !weight.is_floating_point();
    TORCH_CHECK(weight_only == !options.antiquant_scale.empty(),
                "antiquant_scale must be given for floats times int8 matrices, and only for these");
    auto matrix = for_product(weight);
    if (weight_only) {
        if (!options.antiquant_offset.empty()) matrix = matrix + options.of_group(options.antiquant_offset, group);
        matrix = matrix * options.of_group(options.antiquant_scale, group);
    }
    auto y = for_product(rows).matmul(matrix.to(for_product(rows).scalar_type()));
    const auto bias =
        options.bias.empty() ? Tensor() : options.of_group({options.bias.begin(), options.bias.end()}, group);
    if (bias.defined() && !bias.is_floating_point()) y = y + bias;
    if (!options.scale.empty()) y = y * options.of_group(options.scale, group);
    if (!options.token_scale.empty()) {
        y = y * options.token_scale[0].flatten().slice(0, first, first + rows.size(0)).unsqueeze(-1);
    }
    if (bias.defined() && bias.is_floating_point()) y = y + bias;
    return activated(y, options.activation);
}

// The rows of one matrix go to the groups one after the other. Those after the last group are not a part of the result,
// which has no usable values there.
void split_rows(const Tensor& x, const std::vector<AnyTensor>& weight, const IntegerTensor& list, std::int64_t type,
                const Options& options, const Out& out) {
    const std::vector<Tensor> lists(weight.begin(), weight.end());
    const auto matrices = without_batches(lists);
    require_list(list, type, static_cast<std::int64_t>(matrices.size()));
    for (const auto& each : matrices) {
        TORCH_CHECK(each.sizes() == matrices[0].sizes(), "weight has matrices of shapes ", matrices[0].sizes(), " and ",
                    each.sizes(), "; groups of rows of one x take matrices of one shape");
    }
    const auto columns = matrices[0].size(-1);
    TORCH_CHECK(x.dim() == 2 && x.size(1) == matrices[0].size(0), "x of shape ", x.sizes(),
                " cannot be multiplied with matrices of shape ", matrices[0].sizes());
    TORCH_CHECK(out.sizes() == at::IntArrayRef({x.size(0), columns}), "an output has shape ", out.sizes(),
                " instead of ", at::IntArrayRef({x.size(0), columns}));
    const auto groups_count = static_cast<std::int64_t>(matrices.size());
    const auto require_rows = [&](const char* name, const std::vector<Tensor>& tensors) {
        if (tensors.size() != 1 || tensors[0].dim() != 2) return;
        TORCH_CHECK(tensors[0].sizes() == at::IntArrayRef({groups_count, columns}), name, " has shape ",
                    tensors[0].sizes(), " instead of [", groups_count, ", ", columns, "], a row for each group");
    };
    require_rows("bias", {options.bias.begin(), options.bias.end()});
    require_rows("scale", options.scale);
    TORCH_CHECK(options.token_scale.empty() || options.token_scale[0].numel() == x.size(0), "per_token_scale has ",
                options.token_scale.empty() ? 0 : options.token_scale[0].numel(), " elements instead of ", x.size(0),
                ", one for each row of x");
    if (x.is_meta()) {
        group_product(x.slice(0, 0, 1), matrices[0], 0, 0, options);
        return;
    }
    std::int64_t first = 0;
    const auto groups = groups_of(list, type);
    require_groups(groups, groups_count, x.size(0));
    const auto total = std::accumulate(groups.sizes.begin(), groups.sizes.end(), std::int64_t{0});
    TORCH_CHECK(soc() != Soc::Ascend950 || weight.size() == 1 || total == x.size(0), "the groups have ", total,
                " rows instead of ", x.size(0), ", which is what CANN requires of several matrices on this chip");
    for (std::size_t index = 0; index < groups.sizes.size(); ++index) {
        const auto size = groups.sizes[index];
        if (size == 0) continue;
        const auto number = groups.numbers[index];
        const auto rows = x.slice(0, first, first + size);
        const auto y = group_product(rows, matrices[static_cast<std::size_t>(number)], number, first, options);
        out.in_place().slice(0, first, first + size).copy_(out.dtype() == at::kChar ? saturated(y, at::kChar) : y);
        first += size;
    }
    const auto rest = out.in_place().slice(0, first);
    if (rest.is_floating_point()) {
        rest.fill_(std::numeric_limits<double>::quiet_NaN());
    } else {
        rest.fill_(-1);
    }
}

// A product for each group of columns of `x` and rows of `weight`.
std::vector<Tensor> split_sums(const Tensor& x, const Tensor& weight, const IntegerTensor& list, std::int64_t type) {
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(0), "x of shape ", x.sizes(),
                " cannot be multiplied with a matrix of shape ", weight.sizes());
    require_list(list, type, list.size(0));
    TensorList results(static_cast<std::size_t>(list.size(0)), at::zeros({x.size(0), weight.size(1)}, x.options()));
    if (x.is_meta()) return results;
    std::int64_t first = 0;
    const auto groups = groups_of(list, type);
    require_groups(groups, list.size(0), x.size(1));
    for (std::size_t index = 0; index < groups.sizes.size(); ++index) {
        const auto last = first + groups.sizes[index];
        results[static_cast<std::size_t>(groups.numbers[index])] =
            x.slice(1, first, last).matmul(weight.slice(0, first, last));
        first = last;
    }
    return results;
}

using AnyTensorList = std::vector<AnyTensor>;

// A group for each tensor of x, whose products are the rows of one output.
void join_rows(const AnyTensorList& x, const AnyTensorList& weight, const OptionalIntegerTensor& list,
               std::int64_t type, const Options& options, const Out& out) {
    const auto count = std::ssize(x);
    TORCH_CHECK(std::cmp_equal(weight.size(), count), count, " tensors of x have ", weight.size(), " matrices");
    if (list) require_list(*list, type, count);
    if (list && !list->is_meta()) {
        const auto groups = groups_of(*list, type);
        for (std::size_t index = 0; index < x.size(); ++index) {
            TORCH_CHECK(std::cmp_equal(groups.numbers[index], index) && groups.sizes[index] == x[index].size(0),
                        "group_list has ", groups.sizes[index], " rows for the group ", groups.numbers[index],
                        " where x has ", x[index].size(0), " for the group ", index);
        }
    }
    TensorList products;
    for (std::size_t index = 0; index < x.size(); ++index) {
        products.push_back(group_product(x[index], weight[index], static_cast<std::int64_t>(index), 0, options));
    }
    out = at::cat(products);
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
        const Options options{bias, scales, {}, {}, {}, 0, std::ssize(weight)};
        split_rows(x[0], weight, IntegerTensor(at::tensor(ends)), 0, options, outs[0]);
        return;
    }
    products(each_of(x, widened), each_of(weight, widened), each_of(bias, widened), sizes_from_ends(ends), outs);
}
const Formula<"aclnnGroupedMatmul", grouped_by_ends> grouped_by_ints;

// The arguments of all versions: those that are not read say how CANN computes.
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

// What none but quantized products have.
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

// Groups of rows times a matrix each, all in blocks of 32 with a scale each.
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
    const Options options{{}, {}, {}, {}, {}, 0, weight[0].size(0)};
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
    const Options options{call.bias,       scales, call.token_scale, antiquant_scales, antiquant_offsets,
                          call.activation, groups};
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
