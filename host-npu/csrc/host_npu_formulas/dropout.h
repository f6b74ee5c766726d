// Dropout masks: one bit per element, least significant first, packed in bytes; 1 is kept.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Unpacks the first `count` elements of a mask to float32 zeros and ones.
Tensor kept_by(const Tensor& mask, std::int64_t count);

// Returns the mask of `count` elements for a seed and an offset, on the device of `like`.
Tensor drawn_mask(std::int64_t count, double probability, std::int64_t seed, std::int64_t offset, const Tensor& like);

}  // namespace host_npu
