// The names of HCCL's status codes.
#include <iterator>

#include "hccl/api.h"

extern "C" HOST_NPU_EXPORT const char* HcclGetErrorString(HcclResult code) {
    static constexpr const char* names[] = {"no error",
                                            "parameter error",
                                            "empty pointer",
                                            "memory error",
                                            "internal error",
                                            "not support feature",
                                            "not found resource",
                                            "resource unavailable",
                                            "system call error",
                                            "timeout",
                                            "open file fail",
                                            "tcp connect fail",
                                            "roce connect fail",
                                            "tcp transfer fail",
                                            "roce transfer fail",
                                            "call runtime api fail",
                                            "call driver api fail",
                                            "call profiling api fail",
                                            "call cce api fail",
                                            "call network api fail",
                                            "try again",
                                            "error cqe",
                                            "communicator suspending",
                                            "retry constraint",
                                            "out of memory"};
    static_assert(std::size(names) == HCCL_E_RESERVED);
    return code >= 0 && code < HCCL_E_RESERVED ? names[code] : "unknown error";
}
