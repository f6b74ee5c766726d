// The operations of ATB that torch_npu calls by two functions, with tensors of CANN: the first makes the operation,
// unless torch_npu has kept it from a call before, and the second runs it. In a capture, that is another thread, and
// the operation is a new one.
#pragma once

#include <initializer_list>

#include "atb/computed.h"
#include "nnopbase/tensor.h"

namespace atb {

// Makes an operation, unless it is there, and keeps the tensors that are given until it is run.
int begin(std::initializer_list<const aclTensor*> inputs, std::initializer_list<const aclTensor*> on_host,
          std::initializer_list<const aclTensor*> outputs, const char* name, const Formula& formula,
          std::uint64_t* workspace_size, Operation** operation);

int run(Operation* operation, Context* context);

}  // namespace atb
