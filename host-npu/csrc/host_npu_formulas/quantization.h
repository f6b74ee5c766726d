// Code shared by quantizations.
#pragma once

#include <utility>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Rounds half to even and saturates to the dtype.
Tensor saturated(const Tensor& x, at::ScalarType dtype);
void require_int8(const Out& out);
// Returns the floats of a scale, which may be encoded in 64 bits.
Tensor scale_of(const AnyTensor& scale);
// Returns the offset of an int8 result, which npu_trans_quant_param encodes in the upper half of a 64-bit scale.
Tensor offset_of(const AnyTensor& scale);
// Returns each row scaled by 127 / max and rounded, and the inverse factors.
std::pair<Tensor, Tensor> quantized_rows(const Tensor& x);
// Expands numbers per group to rows. `groups` has the ends or the sizes. Rows after the last group get its numbers,
// which are not used.
Tensor of_rows(const Tensor& numbers, std::int64_t rows, const OptionalIntegerTensor& groups, bool sizes);

}  // namespace host_npu
