// Code shared by mixtures of experts.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

inline Tensor stable_order(const Tensor& keys, bool descending = false) {
    return at::argsort(keys, /*stable=*/true, -1, descending);
}

}  // namespace host_npu
