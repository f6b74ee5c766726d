// What mixtures of experts have in common.
#pragma once

#include <ATen/ops/argsort.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {

inline Tensor stable_order(const Tensor& keys, bool descending = false) {
    return at::argsort(keys, /*stable=*/true, -1, descending);
}

// Phase one has no values to look at.
inline void require_indices(const char* name, const Tensor& indices, std::int64_t size) {
    if (indices.is_meta() || indices.numel() == 0) return;
    for (const auto& extreme : {indices.min(), indices.max()}) {
        const auto index = extreme.item<std::int64_t>();
        TORCH_CHECK(index >= 0 && index < size, name, " has the index ", index, "; CANN takes 0 to ", size - 1);
    }
}

}  // namespace host_npu
