// The softmax of scaled scores of which a mask takes some out, for two ways to call it.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale, bool triangular);
Tensor scaled_masked_softmax_grad(const Tensor& dy, const Tensor& y, const Tensor& mask, double scale, bool triangular);

}  // namespace host_npu
