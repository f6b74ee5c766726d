// Reductions: sum, product, maximum and minimum.
#pragma once

#include <cstddef>
#include <vector>

#include "hccl/hccl_types.h"

namespace host_npu::hccl {

// Whether HCCL supports this reduction for this type on this chip, by the documentation of HcclAllReduce.
bool can_reduce(HcclDataType dtype, HcclReduceOp op);

// Reduces `bytes` bytes of all `sources`, in order, into `target`, which may be one of them. 16-bit floats are
// accumulated in float32 and rounded once.
void reduce(HcclDataType dtype, HcclReduceOp op, const std::vector<const std::byte*>& sources, std::byte* target,
            std::size_t bytes);

}  // namespace host_npu::hccl
