// Masks of dropout: a bit for each element, the lowest first, in bytes; 1 is kept.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Which of `count` elements a mask keeps, as float32 0 and 1.
Tensor kept_by(const Tensor& mask, std::int64_t count);

}  // namespace host_npu
