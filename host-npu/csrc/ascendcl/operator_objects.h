// The descriptions of graph operators' (aclop) arguments.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
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
    bool is_on_host = false;
};

struct aclopAttr {
    // Lists, which no simulated operator takes, have no value.
    using Value = std::variant<std::monostate, std::int64_t, float, std::string>;
    std::map<std::string, Value> values;
};

namespace host_npu {

// Returns the last two tensors that the calling thread has described since the last call, null for missing ones.
HOST_NPU_EXPORT std::array<const aclTensorDesc*, 2> take_described();

}  // namespace host_npu
