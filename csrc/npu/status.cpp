#include "status.h"

#include <acl/acl_rt.h>
#include <c10/util/Exception.h>

#include "symbols.h"

// Weak, because the extension does not link against CANN; libtorch_npu.so loads it.
extern "C" const char* aclGetRecentErrMsg() __attribute__((weak));

namespace torch_aclnn_ops {

const char* meaning_of(aclnn::Status status) {
    switch (status) {
        case 161001:
            return "a required pointer is null";
        case 161002:
            return "a parameter is invalid";
        case 361001:
            return "the runtime failed, or this device does not have the operator";
        case 561000:
            return "an inner error";
        case 561001:
            return "the output shapes could not be inferred";
        case 561002:
            return "the kernel cannot cut these shapes into tiles";
        case 561003:
            return "no kernel was found for these arguments";
        case 561101:
            return "the executor could not be created";
        case 561102:
            return "the executor is not the one of phase one";
        case 561103:
            return "a step inside the operator failed, in most cases because the kernel does not take these shapes";
        case 561107:
            return "the path of the operator packages is not set";
        case 561112:
            return "the kernel package is not installed";
        default:
            return "no documented status";
    }
}

std::string take_cann_message() {
    const char* const message = aclGetRecentErrMsg == nullptr ? nullptr : aclGetRecentErrMsg();
    return message == nullptr ? "" : message;
}

std::string describe_status(const char* operator_name, Phase phase, aclnn::Status status, const std::string& message) {
    const bool is_phase_one = phase == Phase::kOne;
    return std::string(operator_name) + ": " + (is_phase_one ? "phase one refused the call" : "phase two failed") +
           " (" + (is_phase_one ? phase_one_name(operator_name) : operator_name) + " returned " +
           std::to_string(status) + ", " + meaning_of(status) + ").\n" +
           (message.empty() ? "CANN gives no reason." : "CANN says: " + message);
}

void raise_status(const char* operator_name, Phase phase, aclnn::Status status, const std::string& message,
                  const std::string& arguments) {
    C10_THROW_ERROR(Error, describe_status(operator_name, phase, status, message) + "\nThe call was " + operator_name +
                               "(" + arguments + ").");
}

}  // namespace torch_aclnn_ops
