// Masks of dropout: a bit for each element, the lowest first, in bytes; 1 is kept.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Which of `count` elements a mask keeps, as float32 0 and 1.
Tensor kept_by(const Tensor& mask, std::int64_t count);

// The mask of `count` elements that seed and offset determine; `like` is a tensor where it is computed.
Tensor drawn_mask(std::int64_t count, double probability, std::int64_t seed, std::int64_t offset, const Tensor& like);

}  // namespace host_npu
