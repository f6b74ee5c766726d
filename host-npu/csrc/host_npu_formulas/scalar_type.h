// Conversion of CANN's dtypes to PyTorch's.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "acl/acl_base.h"

namespace host_npu {

struct TypePair {
    aclDataType of_cann;
    at::ScalarType of_torch;
};
// The dtypes that every formula accepts.
inline constexpr TypePair kTypes[] = {
    {ACL_FLOAT, at::kFloat}, {ACL_FLOAT16, at::kHalf}, {ACL_BF16, at::kBFloat16}, {ACL_BOOL, at::kBool},
    {ACL_INT8, at::kChar},   {ACL_UINT8, at::kByte},   {ACL_INT32, at::kInt},     {ACL_INT64, at::kLong},
};
// Dtypes that a formula accepts only if its rules name them.
inline constexpr TypePair kNamedTypes[] = {
    {ACL_DOUBLE, at::kDouble},
    {ACL_INT16, at::kShort},
    {ACL_COMPLEX64, at::kComplexFloat},
    {ACL_COMPLEX128, at::kComplexDouble},
    {ACL_FLOAT8_E5M2, at::kFloat8_e5m2},
    {ACL_FLOAT8_E4M3FN, at::kFloat8_e4m3fn},
    {ACL_FLOAT8_E8M0, at::kFloat8_e8m0fnu},
    {ACL_FLOAT4_E2M1, at::kFloat4_e2m1fn_x2},
};

inline std::optional<at::ScalarType> scalar_type(aclDataType dtype) {
    for (const auto& [of_cann, of_torch] : kTypes) {
        if (of_cann == dtype) return of_torch;
    }
    return std::nullopt;
}

// Like scalar_type, including the named types.
inline std::optional<at::ScalarType> named_type(aclDataType dtype) {
    for (const auto& [of_cann, of_torch] : kNamedTypes) {
        if (of_cann == dtype) return of_torch;
    }
    return scalar_type(dtype);
}

}  // namespace host_npu
