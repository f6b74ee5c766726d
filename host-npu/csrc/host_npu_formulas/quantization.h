// What quantizations have in common.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Rounded to the nearest even integer that the dtype has.
Tensor saturated(const Tensor& x, at::ScalarType dtype);
void require_int8(const Out& out);

}  // namespace host_npu
