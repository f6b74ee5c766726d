// What CANN's own headers of operators include: the aclnn interface.
#pragma once

#include "aclnn/acl_meta.h"
