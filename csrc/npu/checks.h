// Argument checks are implemented once, in Python (torch_aclnn_ops/ops/*.py), for every device.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <vector>

namespace torch_aclnn_ops {

// Checks dtypes and shapes, and optionally values, of an operator's arguments, given in schema order. Raises the same
// Python exception as on the CPU.
void check_in_python(const char* operator_name, std::vector<c10::IValue> arguments, bool values);

// Raises NotImplementedError if the chip does not provide the operator.
void check_chip_in_python(const char* operator_name, std::vector<c10::IValue> arguments);

// Whether every call checks values, such as the range of indices. Disabled by default: it synchronizes.
inline std::atomic<bool> checks_values{false};

}  // namespace torch_aclnn_ops
