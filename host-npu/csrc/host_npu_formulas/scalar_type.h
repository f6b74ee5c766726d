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

}  // namespace host_npu
