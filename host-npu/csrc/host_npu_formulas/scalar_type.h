// PyTorch's dtypes of CANN's.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "acl/acl_base.h"

namespace host_npu {

// Nothing if a formula cannot have the dtype.
inline std::optional<at::ScalarType> scalar_type(aclDataType dtype) {
    switch (dtype) {
        case ACL_FLOAT:
            return at::kFloat;
        case ACL_FLOAT16:
            return at::kHalf;
        case ACL_BF16:
            return at::kBFloat16;
        case ACL_BOOL:
            return at::kBool;
        case ACL_INT8:
            return at::kChar;
        case ACL_UINT8:
            return at::kByte;
        case ACL_INT32:
            return at::kInt;
        case ACL_INT64:
            return at::kLong;
        default:
            return std::nullopt;
    }
}

// Those too that a formula takes only where its rules name them.
inline std::optional<at::ScalarType> named_type(aclDataType dtype) {
    switch (dtype) {
        case ACL_DOUBLE:
            return at::kDouble;
        case ACL_INT16:
            return at::kShort;
        case ACL_COMPLEX64:
            return at::kComplexFloat;
        case ACL_COMPLEX128:
            return at::kComplexDouble;
        case ACL_FLOAT8_E5M2:
            return at::kFloat8_e5m2;
        case ACL_FLOAT8_E4M3FN:
            return at::kFloat8_e4m3fn;
        case ACL_FLOAT8_E8M0:
            return at::kFloat8_e8m0fnu;
        case ACL_FLOAT4_E2M1:
            return at::kFloat4_e2m1fn_x2;
        default:
            return scalar_type(dtype);
    }
}

}  // namespace host_npu
