// Operations of ATB that torch_npu calls through two functions on CANN's tensors. The first creates the operation,
// unless torch_npu has kept it from an earlier call, and the second runs it. In a capture, the second runs on another
// thread, and the operation is a new one.
#pragma once

#include <initializer_list>

#include "atb/computed.h"
#include "nnopbase/tensor.h"

namespace atb {

// Creates the operation if it does not exist, and stores the tensors until the run.
int begin(std::initializer_list<const aclTensor*> inputs, std::initializer_list<const aclTensor*> on_host,
          std::initializer_list<const aclTensor*> outputs, const char* name, const Formula& formula,
          std::uint64_t* workspace_size, Operation** operation);

int run(Operation* operation, Context* context);

}  // namespace atb
