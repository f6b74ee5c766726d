// What quantizations have in common.
#pragma once

#include <utility>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Rounded to the nearest even integer that the dtype has.
Tensor saturated(const Tensor& x, at::ScalarType dtype);
void require_int8(const Out& out);
// The floats of a scale, which may come as the upper bits of 64.
Tensor scale_of(const AnyTensor& scale);
// What an int8 result is shifted by: a number in the upper ones of 64 bits, as npu_trans_quant_param puts it there.
Tensor offset_of(const AnyTensor& scale);
// Each row times 127 by its largest number, and the inverse of that factor.
std::pair<Tensor, Tensor> quantized_rows(const Tensor& x);
// The numbers of each row: those of its group, of which `groups` has the ends or the sizes. Rows after the last group
// have those of the last one; nobody reads them.
Tensor of_rows(const Tensor& numbers, std::int64_t rows, const OptionalIntegerTensor& groups, bool sizes);

}  // namespace host_npu
