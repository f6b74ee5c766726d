// Names that the acl headers of torch_npu 2.9 lack, with CANN's values.
#pragma once

#include "acl/acl.h"

#if ACL_MAJOR_VERSION == 1 && ACL_MINOR_VERSION < 17
struct aclrtPlaceHolderInfo;
#endif

#ifndef ACL_HOST_REG_READONLY
#define ACL_HOST_REG_READONLY 0x8UL
#endif

#ifndef ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED
#define ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED 507910
#define ACL_ERROR_HOST_MEMORY_NOT_REGISTERED 507911
#endif

// Older headers misspell it as IFNO.
inline constexpr auto kStreamAttributeCacheOpInfo = static_cast<aclrtStreamAttr>(4);
