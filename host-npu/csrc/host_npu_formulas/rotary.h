// Rotations used by other operators.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Moves the even elements of a head before the odd ones, then rotates the halves.
Tensor rotated_sorted(const Tensor& x, const Tensor& cos, const Tensor& sin);

}  // namespace host_npu
