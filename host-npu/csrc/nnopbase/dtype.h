// Properties of the data types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "aclnn/acl_meta.h"

namespace host_npu {

struct DtypeProperties {
    aclDataType dtype;
    const char* name;
    // The size of an element in bytes; 0 for types that the host NPU does not compute with.
    std::size_t item_size;
};

inline constexpr DtypeProperties kDtypeProperties[] = {
    {ACL_FLOAT, "float32", 4},
    {ACL_FLOAT16, "float16", 2},
    {ACL_BF16, "bfloat16", 2},
    {ACL_DOUBLE, "float64", 8},
    {ACL_INT8, "int8", 1},
    {ACL_INT16, "int16", 2},
    {ACL_INT32, "int32", 4},
    {ACL_INT64, "int64", 8},
    {ACL_UINT8, "uint8", 1},
    {ACL_UINT16, "uint16", 2},
    {ACL_UINT32, "uint32", 4},
    {ACL_UINT64, "uint64", 8},
    {ACL_BOOL, "bool", 1},
    {ACL_COMPLEX32, "complex32", 4},
    {ACL_COMPLEX64, "complex64", 8},
    {ACL_COMPLEX128, "complex128", 16},
    {ACL_STRING, "string", 0},
    {ACL_INT4, "int4", 0},
    {ACL_UINT1, "uint1", 0},
    {ACL_HIFLOAT8, "hifloat8", 0},
    {ACL_FLOAT8_E5M2, "float8_e5m2", 1},
    {ACL_FLOAT8_E4M3FN, "float8_e4m3fn", 1},
    {ACL_FLOAT8_E8M0, "float8_e8m0fnu", 1},
    {ACL_FLOAT6_E3M2, "float6_e3m2", 0},
    {ACL_FLOAT6_E2M3, "float6_e2m3", 0},
    {ACL_FLOAT4_E2M1, "float4_e2m1", 0},
    {ACL_FLOAT4_E1M2, "float4_e1m2", 0},
};

constexpr DtypeProperties properties(aclDataType dtype) {
    for (const auto& each : kDtypeProperties) {
        if (each.dtype == dtype) return each;
    }
    return {dtype, "unknown", 0};
}

// Whether a byte holds two elements.
constexpr bool is_packed(aclDataType dtype) { return dtype == ACL_FLOAT4_E2M1 || dtype == ACL_FLOAT4_E1M2; }
constexpr std::size_t item_size(aclDataType dtype) { return properties(dtype).item_size; }
constexpr const char* dtype_name(aclDataType dtype) { return properties(dtype).name; }

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
