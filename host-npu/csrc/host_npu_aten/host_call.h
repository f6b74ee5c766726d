// A call of an operator's CPU kernel.
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

// Returns the value with other tensors, also where they stand in lists; `other` gets undefined ones too.
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& other);

// Takes the generator out of the arguments, which has to be the device's.
std::optional<at::Generator> take_generator(Arguments arguments, c10::Device device);

// Calls the CPU's kernel with tensors of the host, the last values of `stack`, which `arguments` point to. With a seed
// its random numbers are those of the seed. Its results take their place, rounded as a device rounds them. Where `out`
// is defined it has the shape and the dtype of the only result, and becomes it.
void call_on_host(const c10::OperatorHandle& op, Arguments arguments, torch::jit::Stack* stack,
                  std::optional<std::uint64_t> seed, const at::Tensor& out = {});

}  // namespace host_npu
