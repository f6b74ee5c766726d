// Code shared by gated units.
#pragma once

#include <utility>

#include "host_npu_formulas/formula.h"

namespace host_npu {

inline std::pair<Tensor, Tensor> halves(const Tensor& x, std::int64_t dim) {
    TORCH_CHECK(x.size(dim) % 2 == 0, "dimension ", dim, " has ", x.size(dim), " elements, which cannot be halved");
    const auto parts = x.chunk(2, dim);
    return {parts[0], parts[1]};
}

}  // namespace host_npu
