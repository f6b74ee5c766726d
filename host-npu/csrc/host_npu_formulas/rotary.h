// Rotations that others use.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

// The even elements of a head come before the odd ones, then the halves are rotated.
Tensor rotated_sorted(const Tensor& x, const Tensor& cos, const Tensor& sin);

}  // namespace host_npu
