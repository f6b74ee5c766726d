#include "opapi/native_kernels.h"

namespace host_npu {
namespace {

// Created on first use: the initialization order of the files is unspecified.
std::vector<std::string>& registered() {
    static std::vector<std::string> names;
    return names;
}

}  // namespace

const std::vector<std::string>& native_kernels() { return registered(); }

NativeKernels::NativeKernels(std::initializer_list<const char*> aten_operators) {
    registered().insert(registered().end(), aten_operators.begin(), aten_operators.end());
}

}  // namespace host_npu
