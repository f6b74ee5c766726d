// The descriptions of arguments of graph operators (aclop).
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
    // The storage format and dimensions, if they differ from those of the tensor.
    aclFormat storage_format;
    std::vector<std::int64_t> storage_dims;
    bool is_on_host = false;
};

struct aclopAttr {
    // No simulated operator takes other lists, so their values are not stored.
    using Value =
        std::variant<std::monostate, std::int64_t, float, std::string, std::vector<std::int64_t>, std::vector<float>>;
    std::map<std::string, Value> values;
};

namespace host_npu {

// Returns the last two tensors that the calling thread has described since the previous call; null if missing.
HOST_NPU_EXPORT std::array<const aclTensorDesc*, 2> take_described();

}  // namespace host_npu
