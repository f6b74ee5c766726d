// Conversion of CANN statuses to exceptions.
#pragma once

#include <string>

#include "aclnn_api.h"

namespace torch_aclnn_ops {

enum class Phase { kOne, kTwo };

// A short description of a status code.
const char* meaning_of(aclnn::Status status);

// CANN's message about the latest failure on this thread, or an empty string. Reading clears it.
std::string take_cann_message();

// Describes a failure: operator, phase, status code, its meaning, and CANN's message.
std::string describe_status(const char* operator_name, Phase phase, aclnn::Status status, const std::string& message);

// Raises a RuntimeError with the operator, phase, code, meaning, CANN's message and the arguments of the call.
[[noreturn]] void raise_status(const char* operator_name, Phase phase, aclnn::Status status, const std::string& message,
                               const std::string& arguments);

}  // namespace torch_aclnn_ops
