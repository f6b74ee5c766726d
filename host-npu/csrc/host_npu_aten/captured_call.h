// Operator calls on a stream that is being captured.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace host_npu {

// If the current stream of the call's device is being captured, records the call and pushes its results, whose memory
// replays fill. Does not write to the memory of the arguments. Otherwise returns false.
bool record_call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace host_npu
