// The descriptions of graph operators' (aclop) arguments.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "ascendcl/device.h"

struct aclDataBuffer {
    void* data;
    std::size_t size;
};

struct aclTensorDesc {
    aclDataType type;
    std::vector<std::int64_t> dims;
    aclFormat format;
    std::string name;
    // The storage layout of the tensor, if it differs from the dimensions.
    aclFormat storage_format;
    std::vector<std::int64_t> storage_dims;
};

namespace host_npu {

// Returns the last two tensors that the calling thread has described since the last call, null for missing ones.
HOST_NPU_EXPORT std::array<const aclTensorDesc*, 2> take_described();

}  // namespace host_npu
