// The scores that the mask and the sparse mode of attention mask out.
#include "host_npu_formulas/attention_masks.h"

#include <algorithm>
#include <limits>

#include "host_npu_formulas/halves.h"

namespace host_npu {
namespace {

// The size of the triangular mask of the sparse modes 2 to 4.
constexpr std::int64_t kTriangle = 2048;

// Checks the mask of the modes 2 to 4, a triangle of 2048 rows for any lengths, by its first and last row.
void require_triangle(const Tensor& mask) {
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) == kTriangle && mask.size(-2) == kTriangle,
                "attenMask of the sparse modes 2 to 4 has shape ", mask.sizes(), " instead of ends of 2048 x 2048");
    if (mask.is_meta()) return;
    const auto last = mask.reshape({-1, kTriangle, kTriangle})[0][-1].to(at::kBool);
    const auto first = mask.reshape({-1, kTriangle, kTriangle})[0][0].to(at::kBool);
    TORCH_CHECK(!first[0].item<bool>() && first.slice(0, 1).all().item<bool>() && !last.any().item<bool>(),
                "attenMask of the sparse modes 2 to 4 is not the upper triangle without the diagonal");
}

// The scores outside the band of key index minus query index, aligned at the first or the last tokens.
Tensor outside(const Inputs& in, std::int64_t before, std::int64_t after, bool from_the_last) {
    const auto options = in.query.options().dtype(at::kLong);
    const auto queries = in.query.size(2), keys = in.key.size(2);
    const auto shift = from_the_last ? keys - queries : 0;
    const auto distance = at::arange(keys, options).unsqueeze(0) - at::arange(queries, options).unsqueeze(1) - shift;
    return distance.lt(-before).logical_or(distance.gt(after));
}

// A causal mask aligned at the last tokens, with each batch's prefix unmasked.
Tensor outside_of_prefix(const Inputs& in, const Ints& prefix) {
    const auto batches = in.query.size(0), keys = in.key.size(2);
    TORCH_CHECK(static_cast<std::int64_t>(prefix.size()) == batches, "prefix has ", prefix.size(),
                " numbers instead of one for each of ", batches, " batches");
    auto masks = outside(in, std::numeric_limits<std::int32_t>::max(), 0, true).repeat({batches, 1, 1, 1});
    for (std::int64_t batch = 0; batch < batches; ++batch) {
        const auto length = prefix[static_cast<std::size_t>(batch)];
        TORCH_CHECK(length >= 0 && length <= keys, "prefix is ", at::IntArrayRef(prefix), " for ", keys,
                    " keys; CANN takes 0 to this number");
        masks[batch].narrow(-1, 0, length).zero_();
    }
    return masks;
}

// Checks the mask of mode 6: a triangle above a block whose left half is unmasked.
void require_prefix_mask(const Tensor& mask) {
    constexpr std::int64_t rows = 3072;
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) == kTriangle && mask.size(-2) == rows,
                "attenMask of the sparse mode 6 has shape ", mask.sizes(), " instead of ends of 3072 x 2048");
    require_triangle(mask.slice(-2, 0, kTriangle));
    if (mask.is_meta()) return;
    const auto [left, right] = halves(mask.slice(-2, kTriangle).to(at::kBool), -1);
    TORCH_CHECK(!left.any().item<bool>() && right.all().item<bool>(),
                "attenMask of the sparse mode 6 does not end in rows of which the right half is left out");
}

// Mode 5 passes the actual mask, mode 6 a fixed pattern.
Tensor left_out_by_prefix(const Inputs& in, const Tensor& mask, const Setting& at) {
    const auto masks = outside_of_prefix(in, at.prefix);
    if (at.mode == 6) {
        require_prefix_mask(mask);
    } else {
        TORCH_CHECK(at::is_expandable_to(mask.sizes(), masks.sizes()) || mask.size(0) == masks.size(0),
                    "attenMask has shape ", mask.sizes(), ", which does not broadcast to that of the prefixes, ",
                    masks.sizes());
        TORCH_CHECK(mask.is_meta() || mask.to(at::kBool).eq(masks).all().item<bool>(),
                    "attenMask of the sparse mode 5 is not causal from the last but for the prefixes");
    }
    return masks;
}

}  // namespace

OptionalTensor left_out(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at) {
    if (!mask) return std::nullopt;
    constexpr auto all = std::numeric_limits<std::int32_t>::max();
    if (at.mode >= 5) return left_out_by_prefix(in, *mask, at);
    if (at.mode >= 2) {
        require_triangle(*mask);
        if (at.mode == 4) return outside(in, at.before, at.after, true);
        return outside(in, all, 0, at.mode == 3);
    }
    Tensor given = mask->to(at::kBool);
    if (at.packed() && given.dim() >= 2) given = given.slice(-2, 0, in.query.size(2)).slice(-1, 0, in.key.size(2));
    TORCH_CHECK(given.dim() >= 2 && given.size(-2) == in.query.size(2) && given.size(-1) == in.key.size(2),
                "attenMask has shape ", mask->sizes(), " instead of [..., ", in.query.size(2), ", ", in.key.size(2),
                "], a row for each query and a column for each key");
    return at.mode == 1 ? given : given.logical_or(outside(in, at.before, at.after, false));
}

std::int64_t last_attended(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at) {
    const auto keys = in.key.size(2), shift = keys - in.query.size(2);
    if (!mask || at.mode == 1 || at.mode >= 5) return keys;
    if (at.mode == 2 || at.mode == 3) return at.mode == 2 ? 0 : shift;
    return std::min(at.after, keys) + (at.mode == 4 ? shift : 0);
}

}  // namespace host_npu
