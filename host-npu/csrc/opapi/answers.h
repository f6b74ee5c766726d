// aclnn functions that torch_npu looks up, refused by name unless opapi/ or another library implements them.
#pragma once

#include "ascendcl/device.h"

namespace host_npu {

// A function of CANN with any signature.
using AnyFunction = void (*)();

// Installs the implementation of the aclnn function `name`. `has_rules`: whether it makes the checks that CANN
// documents. Does nothing if the installed torch_npu does not know the function. Not thread-safe: call it while a
// library is loaded.
HOST_NPU_EXPORT void answer(const char* name, AnyFunction phase_one, AnyFunction phase_two, bool has_rules);

}  // namespace host_npu
