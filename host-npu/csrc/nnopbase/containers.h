// The definitions of aclScalar and the arrays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "aclnn/acl_meta.h"

struct aclScalar {
    bool alive = false;
    std::uint64_t generation = 0;
    aclDataType dtype = ACL_DT_UNDEFINED;
    // Fits the largest type, complex128.
    std::array<std::byte, 16> value{};
};

namespace host_npu {

template <class Value>
struct Array {
    bool alive = false;
    std::uint64_t generation = 0;
    std::vector<Value> values;
};

}  // namespace host_npu

struct aclIntArray : host_npu::Array<std::int64_t> {};
struct aclFloatArray : host_npu::Array<float> {};
// One byte per element, because std::vector<bool> has no data().
struct aclBoolArray : host_npu::Array<std::uint8_t> {};
