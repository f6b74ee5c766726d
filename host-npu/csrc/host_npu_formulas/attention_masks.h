// The scores that the mask and the sparse mode of attention mask out.
#pragma once

#include "host_npu_formulas/attention.h"

namespace host_npu {

// Returns the mask of the scores (1: masked out), if any.
OptionalTensor left_out(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at);

// Returns an upper bound of key index minus query index of the unmasked scores.
std::int64_t last_attended(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at);

}  // namespace host_npu
