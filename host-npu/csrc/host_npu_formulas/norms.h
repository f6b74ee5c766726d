// What RmsNorm and LayerNorm have in common.
#pragma once

#include <vector>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// The last dimensions of x, of which gamma has the sizes.
std::vector<std::int64_t> normalized(const Tensor& x, const Tensor& gamma);

// What RmsNorm returns: x normalized, and the factor of each row.
struct RmsNormal {
    Tensor result, rstd;
};
RmsNormal rms_normal(const Tensor& x, const Tensor& gamma, double epsilon, const OptionalTensor& beta = {});

}  // namespace host_npu
