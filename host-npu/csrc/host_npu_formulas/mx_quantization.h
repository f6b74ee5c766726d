// Numbers of 8 or 4 bits in blocks that share a power of two: the MX formats of the Open Compute Project.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

inline constexpr Dtypes kBytesOfBlocks{ACL_FLOAT8_E4M3FN, ACL_FLOAT8_E5M2};
inline constexpr Dtypes kBlockNumbers = kBytesOfBlocks | Dtypes{ACL_FLOAT4_E2M1};
inline constexpr Dtypes kBlockScales{ACL_FLOAT8_E8M0};
// Blocks that matrix products take.
inline constexpr std::int64_t kMxBlock = 32;

// Throws a Refusal on chips that have none.
void require_mx();
// Refuses what cannot be multiplied as blocks: other dtypes, numbers of 4 bits with others, and such whose pairs are
// not in the dimension that is summed over.
void require_factors(const Tensor& x, const Tensor& weight);
// Floats of blocks of 32 along a dimension. The scales of two neighbouring blocks are next to each other, in a last
// dimension of their own.
Tensor from_blocks(const Tensor& x, const Tensor& scale, std::int64_t axis);
// Quantizes blocks of 32 of the last dimension, whose largest numbers saturate.
void to_blocks(const Tensor& x, const Out& y, const Out& scale);

}  // namespace host_npu
