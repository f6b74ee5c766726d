// What RmsNorm and LayerNorm have in common.
#pragma once

#include <vector>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// The last dimensions of x, of which gamma has the sizes.
std::vector<std::int64_t> normalized(const Tensor& x, const Tensor& gamma);

}  // namespace host_npu
