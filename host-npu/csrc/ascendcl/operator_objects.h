// The descriptions with which graph operators (aclop) are called.
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
    // How the tensor lies in memory, if not as the dimensions say.
    aclFormat storage_format;
    std::vector<std::int64_t> storage_dims;
};

namespace host_npu {

// Returns the last two tensors that the calling thread has described since it last asked, null in the place of those
// that it has not.
HOST_NPU_EXPORT std::array<const aclTensorDesc*, 2> take_described();

}  // namespace host_npu
