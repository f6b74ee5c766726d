// Properties of the data types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "aclnn/acl_meta.h"

namespace host_npu {

// The size of an element in bytes; 0 for an unknown type.
constexpr std::size_t item_size(aclDataType dtype) {
    switch (dtype) {
        case ACL_BOOL:
        case ACL_INT8:
        case ACL_UINT8:
            return 1;
        case ACL_FLOAT16:
        case ACL_BF16:
        case ACL_INT16:
        case ACL_UINT16:
            return 2;
        case ACL_FLOAT:
        case ACL_INT32:
        case ACL_UINT32:
        case ACL_COMPLEX32:
            return 4;
        case ACL_DOUBLE:
        case ACL_INT64:
        case ACL_UINT64:
        case ACL_COMPLEX64:
            return 8;
        case ACL_COMPLEX128:
            return 16;
        default:
            return 0;
    }
}

constexpr const char* dtype_name(aclDataType dtype) {
    switch (dtype) {
        case ACL_FLOAT:
            return "float32";
        case ACL_FLOAT16:
            return "float16";
        case ACL_BF16:
            return "bfloat16";
        case ACL_DOUBLE:
            return "float64";
        case ACL_INT8:
            return "int8";
        case ACL_INT16:
            return "int16";
        case ACL_INT32:
            return "int32";
        case ACL_INT64:
            return "int64";
        case ACL_UINT8:
            return "uint8";
        case ACL_UINT16:
            return "uint16";
        case ACL_UINT32:
            return "uint32";
        case ACL_UINT64:
            return "uint64";
        case ACL_BOOL:
            return "bool";
        case ACL_COMPLEX32:
            return "complex32";
        case ACL_COMPLEX64:
            return "complex64";
        case ACL_COMPLEX128:
            return "complex128";
        case ACL_STRING:
            return "string";
        case ACL_INT4:
            return "int4";
        case ACL_UINT1:
            return "uint1";
        case ACL_HIFLOAT8:
            return "hifloat8";
        case ACL_FLOAT8_E5M2:
            return "float8_e5m2";
        case ACL_FLOAT8_E4M3FN:
            return "float8_e4m3fn";
        case ACL_FLOAT8_E8M0:
            return "float8_e8m0fnu";
        case ACL_FLOAT6_E3M2:
            return "float6_e3m2";
        case ACL_FLOAT6_E2M3:
            return "float6_e2m3";
        case ACL_FLOAT4_E2M1:
            return "float4_e2m1";
        case ACL_FLOAT4_E1M2:
            return "float4_e1m2";
        default:
            return "unknown";
    }
}

// A set of data types.
class DtypeSet {
  public:
    constexpr DtypeSet(std::initializer_list<aclDataType> dtypes) {
        for (const auto dtype : dtypes) bits_ |= bit(dtype);
    }
    constexpr bool contains(aclDataType dtype) const { return (bits_ & bit(dtype)) != 0; }
    constexpr bool empty() const { return bits_ == 0; }
    constexpr DtypeSet operator|(DtypeSet other) const {
        other.bits_ |= bits_;
        return other;
    }

  private:
    static constexpr std::uint64_t bit(aclDataType dtype) {
        const auto number = static_cast<int>(dtype);
        return number < 0 || number > 63 ? 0 : std::uint64_t{1} << number;
    }

    std::uint64_t bits_ = 0;
};

}  // namespace host_npu
