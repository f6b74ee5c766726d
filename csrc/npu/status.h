// From a status of CANN to an exception of Python.
#pragma once

#include <string>

#include "aclnn_api.h"

namespace torch_aclnn_ops {

enum class Phase { kOne, kTwo };

// What a status code means, in a few words.
const char* meaning_of(aclnn::Status status);

// What CANN says about this thread's latest failure; empty if nothing. Reading clears it.
std::string take_cann_message();

// Says what failed: operator, phase, code, its meaning, and CANN's own text.
std::string describe_status(const char* operator_name, Phase phase, aclnn::Status status, const std::string& message);

// Raises a RuntimeError with operator, phase, code, meaning, CANN's own text, and the arguments of the call.
[[noreturn]] void raise_status(const char* operator_name, Phase phase, aclnn::Status status, const std::string& message,
                               const std::string& arguments);

}  // namespace torch_aclnn_ops
