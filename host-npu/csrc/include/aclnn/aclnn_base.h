// Initialization and finalization of the aclnn libraries.
#pragma once

#include "aclnn/acl_meta.h"

extern "C" {
ACLNN_API aclnnStatus aclnnInit(const char* configPath);
ACLNN_API aclnnStatus aclnnFinalize();
}
