// Copies between tensors of any strides and data types.
#pragma once

#include "nnopbase/call.h"

namespace host_npu {

// Copies `from`, broadcast and cast, to `to`.
void copy(const HostTensor& to, const HostTensor& from);

}  // namespace host_npu
