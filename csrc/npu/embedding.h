// The gradient of an embedding: where CANN's kernel needs help.
#pragma once

#include <cstdint>

namespace torch_aclnn_ops {

// Whether a gradient in 16 bits of an embedding goes to the kernel of an Ascend910B that is wrong with a padding_idx.
//
// That kernel sorts the indices and cuts them in shares, one for each core. Where a share begins or ends with
// padding_idx, the first 11 gradients, or 22 ..., of a run of another index may be lost or added to the padding row.
// CANN takes it for large gradients that are not scaled by frequency.
bool skips_padding_wrongly(int64_t rows, int64_t features, int64_t num_weights, bool is_deterministic);

}  // namespace torch_aclnn_ops
