#include "hccl/api.h"

#include <iostream>

namespace host_npu::hccl {

HcclResult failed(const char* function, HcclResult result, const std::string& text) noexcept {
    try {
        // The runtime's codes start above HCCL's.
        const auto status = result < HCCL_E_RESERVED ? ACL_ERROR_INTERNAL_ERROR : static_cast<std::int32_t>(result);
        report_error(status, std::string(function) + ": " + text);
    } catch (const std::exception&) {
        std::cerr << "host NPU: no memory for the message of " << function << '\n';
    }
    return result;
}

std::shared_ptr<Communicator> communicator_of(HcclComm handle) {
    require(handle, "comm");
    std::shared_ptr<Communicator> communicator;
    try {
        communicator = communicators().get(handle);
    } catch (const Error&) {
        throw Refusal(HCCL_E_PARA, "comm is not a live communicator");
    }
    require(communicator->is_of_this_process(), "comm was made before this process was forked from another");
    return communicator;
}

void require_intact(const Communicator& communicator) {
    try {
        communicator.throw_if_failed();
    } catch (const Error& error) {
        throw Refusal(communicator.failure(), error.what());
    }
}

}  // namespace host_npu::hccl
