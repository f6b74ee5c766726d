// Sums, products, largest and smallest of the ranks' elements.
#pragma once

#include <cstddef>
#include <vector>

#include "hccl/hccl_types.h"

namespace host_npu::hccl {

// Whether HCCL reduces elements of this type with this operation on this chip, as its document of HcclAllReduce says.
bool can_reduce(HcclDataType dtype, HcclReduceOp op);

// Combines `bytes` bytes of elements of all `sources`, in their order, into `target`, which may be one of them. 16-bit
// floats are combined in float32 and rounded once.
void reduce(HcclDataType dtype, HcclReduceOp op, const std::vector<const std::byte*>& sources, std::byte* target,
            std::size_t bytes);

}  // namespace host_npu::hccl
