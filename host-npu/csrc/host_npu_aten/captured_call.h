// Calls of operators on a stream that is being captured.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace host_npu {

// If the current stream of the call's device is being captured, records the call for replays and puts its results on
// the stack: tensors whose memory a replay fills. The memory of its arguments stays as it is. Otherwise returns false.
bool record_call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace host_npu
