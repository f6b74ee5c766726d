// 8-bit and 4-bit numbers in blocks that share a power of two: the MX formats of the Open Compute Project.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

inline constexpr Dtypes kBytesOfBlocks{ACL_FLOAT8_E4M3FN, ACL_FLOAT8_E5M2};
inline constexpr Dtypes kBlockNumbers = kBytesOfBlocks | Dtypes{ACL_FLOAT4_E2M1};
inline constexpr Dtypes kBlockScales{ACL_FLOAT8_E8M0};
// The block size of matrix products.
inline constexpr std::int64_t kMxBlock = 32;

// Throws a Refusal on chips without MX formats.
void require_mx();
// Refuses invalid factors of a product: other dtypes, 4-bit numbers with other dtypes, and 4-bit numbers that are not
// packed in the dimension of the sum.
void require_factors(const Tensor& x, const Tensor& weight);
// Dequantizes blocks of 32 along a dimension. The scales of two neighboring blocks are adjacent in a last dimension.
Tensor from_blocks(const Tensor& x, const Tensor& scale, std::int64_t axis);
// Quantizes blocks of 32 in the last dimension. The largest numbers saturate.
void to_blocks(const Tensor& x, const Out& y, const Out& scale);

}  // namespace host_npu
