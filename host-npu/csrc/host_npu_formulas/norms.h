// Code shared by RmsNorm and LayerNorm.
#pragma once

#include <vector>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// Returns the last dimensions of x, which gamma spans.
std::vector<std::int64_t> normalized(const Tensor& x, const Tensor& gamma);

// The result of RmsNorm and the factor of each row.
struct RmsNormal {
    Tensor result, rstd;
};
RmsNormal rms_normal(const Tensor& x, const Tensor& gamma, double epsilon, const OptionalTensor& beta = {});

}  // namespace host_npu
