// An answer for every aclnn function that torch_npu can ask for. What opapi/ does not define is refused by its name,
// unless another library computes it.
#pragma once

#include "ascendcl/device.h"

namespace host_npu {

// A function of CANN, of whatever signature.
using AnyFunction = void (*)();

// Lets two functions answer calls of the function `name`; `has_rules` says whether they refuse what CANN's documents
// do. Does nothing if the installed torch_npu does not know it. Call it while a library is loaded: nobody may call the
// function at the same time.
HOST_NPU_EXPORT void answer(const char* name, AnyFunction phase_one, AnyFunction phase_two, bool has_rules);

}  // namespace host_npu
