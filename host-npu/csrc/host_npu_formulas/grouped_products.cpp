#include "host_npu_formulas/grouped_products.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "host_npu_formulas/quantization.h"
#include "opapi/chip.h"

namespace host_npu {
namespace {

// The groups of rows, given as cumulative sizes (0), sizes (1), or pairs of a group and its size (2).
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

// Converts the factors of a product. Sums of integers are exact in float64.
Tensor for_product(const Tensor& x) { return x.is_floating_point() ? widened(x) : x.to(at::kDouble); }

}  // namespace

Tensor GroupOptions::of_group(const TensorList& list, std::int64_t group) const {
    const bool is_of_all = list.size() == 1 && (groups > 1 || list[0].dim() > 1);
    return is_of_all ? list[0][group] : list[static_cast<std::size_t>(group)].squeeze(0);
}

TensorList without_batches(const TensorList& matrices) {
    return matrices.size() == 1 && matrices[0].dim() == 3 ? matrices[0].unbind() : matrices;
}

Sizes sizes_from_ends(Sizes ends) {
    std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
    for (const auto size : ends) TORCH_CHECK(size >= 0, "the ends of the groups must not decrease");
    return ends;
}

Tensor group_product(const Tensor& rows, const Tensor& weight, std::int64_t group, std::int64_t first,
                     const GroupOptions& options) {
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
    if (!options.offset.empty()) y = y + options.of_group(options.offset, group);
    if (!options.token_scale.empty()) {
        y = y * options.token_scale[0].flatten().slice(0, first, first + rows.size(0)).unsqueeze(-1);
    }
    if (bias.defined() && bias.is_floating_point()) y = y + bias;
    return activated(y, options.activation);
}

void split_rows(const Tensor& x, const AnyTensorList& weight, const IntegerTensor& list, std::int64_t type,
                const GroupOptions& options, const Out& out) {
    const auto matrices = without_batches({weight.begin(), weight.end()});
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
    const auto require_rows = [&](const char* name, const TensorList& tensors) {
        if (tensors.size() != 1 || (groups_count == 1 && tensors[0].dim() == 1)) return;
        TORCH_CHECK(tensors[0].sizes() == at::IntArrayRef({groups_count, columns}), name, " has shape ",
                    tensors[0].sizes(), " instead of [", groups_count, ", ", columns, "], a row for each group");
    };
    require_rows("bias", {options.bias.begin(), options.bias.end()});
    // The Ascend950 also accepts one number per group.
    const bool has_numbers = soc() == Soc::Ascend950 && options.scale.size() == 1 && options.scale[0].dim() == 1 &&
                             options.scale[0].numel() == groups_count;
    if (!has_numbers) require_rows("scale", options.scale);
    require_rows("antiquant_scale", options.antiquant_scale);
    require_rows("antiquant_offset", options.antiquant_offset);
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

TensorList split_sums(const Tensor& x, const Tensor& weight, const IntegerTensor& list, std::int64_t type) {
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

void join_rows(const AnyTensorList& x, const AnyTensorList& weight, const OptionalIntegerTensor& list,
               std::int64_t type, const GroupOptions& options, const Out& out) {
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

}  // namespace host_npu
