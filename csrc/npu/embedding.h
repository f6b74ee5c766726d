// The gradient of an embedding: a workaround for a bug in CANN's kernel.
#pragma once

#include <cstdint>

namespace torch_aclnn_ops {

// Whether a 16-bit embedding gradient uses the Ascend910B kernel that is wrong with a padding_idx.
//
// That kernel sorts the indices and splits them among the cores. If a core's part begins or ends with padding_idx, the
// first 11 gradients, or 22 ..., of a run of another index may be lost or added to the padding row. CANN uses it for
// large gradients that are not scaled by frequency.
bool skips_padding_wrongly(int64_t rows, int64_t features, int64_t num_weights, bool is_deterministic);

}  // namespace torch_aclnn_ops
