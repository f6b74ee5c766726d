// Calls of an operator's CPU kernel.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace host_npu {

using Arguments = c10::ArrayRef<c10::IValue*>;

// Replaces all tensors in the value, also those in lists. `other` is also called for undefined tensors.
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& other);

// Removes the generator from the arguments and returns it. It must be on `device`.
std::optional<at::Generator> take_generator(Arguments arguments, c10::Device device);

// Calls the CPU kernel with the last values of `stack`, host tensors that `arguments` point to. With a seed, its random
// numbers are determined by the seed. The results, rounded as on a device, replace the arguments on the stack. If `out`
// is defined, it has the shape and the dtype of the only result, and receives it.
void call_on_host(const c10::OperatorHandle& op, Arguments arguments, torch::jit::Stack* stack,
                  std::optional<std::uint64_t> seed, const at::Tensor& out = {});

}  // namespace host_npu
