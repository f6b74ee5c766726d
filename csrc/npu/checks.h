// The argument rules are written once, in Python (torch_aclnn_ops/ops/*.py), and hold on every device.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <vector>

namespace torch_aclnn_ops {

// Applies the operator's rules for dtypes and shapes, and for values if asked, to its arguments in the schema's order.
// Raises Python's exception where one is broken, with the same class and sentence as on the CPU.
void check_in_python(const char* operator_name, std::vector<c10::IValue> arguments, bool values);

// Raises NotImplementedError if the chip lacks the operator.
void check_chip_in_python(const char* operator_name, std::vector<c10::IValue> arguments);

// Whether every call checks values, such as the range of indices. Off by default: it waits for the device.
inline std::atomic<bool> checks_values{false};

}  // namespace torch_aclnn_ops
