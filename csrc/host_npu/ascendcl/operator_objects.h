// The descriptions with which graph operators (aclop) are called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl.h"

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
