// The softmax of scaled, masked scores, shared by two operators.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale, bool triangular);
Tensor scaled_masked_softmax_grad(const Tensor& dy, const Tensor& y, const Tensor& mask, double scale, bool triangular);

}  // namespace host_npu
