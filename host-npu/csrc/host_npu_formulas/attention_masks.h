// Which scores the mask and the sparse mode of attention leave out.
#pragma once

#include "host_npu_formulas/attention.h"

namespace host_npu {

// Which scores are left out, if any.
OptionalTensor left_out(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at);

// Keys may be attended to up to this difference of their number and their query's.
std::int64_t last_attended(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at);

}  // namespace host_npu
