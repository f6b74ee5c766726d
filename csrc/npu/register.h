// Registers an operator with PyTorch's dispatcher, with autograd and with the Python module.
#pragma once

#include <torch/library.h>

#include <cstdint>
#include <vector>

#include "../autograd/functions.h"
#include "dispatch.h"
#include "symbols.h"

namespace torch_aclnn_ops {

// The functions of an operator that the Python module exposes.
struct Registered {
    const char* name;
    const char* cann_name;
    int64_t (*launches)();
    void (*define)(py::module_& module);
    py::object (*make_entry)(const py::object& fallback);
};

inline std::vector<Registered>& registered() {
    static std::vector<Registered> operators;
    return operators;
}

// An Operator is a Signature with the name of the raw operator and the kernel for NPU tensors, run().
template <class Operator>
class Register {
  public:
    Register()
        : kernels_(torch::Library::IMPL, "torch_aclnn_ops", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__),
          autograd_(torch::Library::IMPL, "torch_aclnn_ops", c10::DispatchKey::AutogradPrivateUse1, __FILE__,
                    __LINE__) {
        kernels_.impl(Operator::name, TORCH_FN(DispatchOf<Operator>::kernel));
        autograd_.impl(Operator::name, TORCH_FN(DispatchOf<Operator>::autograd));
        registered().push_back({
            Operator::name,
            Operator::cann,
            [] { return launches_of<Operator>.load(); },
            [](py::module_& module) {
                module.def(Operator::name, DispatchOf<Operator>::kernel, py::call_guard<py::gil_scoped_release>(),
                           "Call the operator on npu tensors directly: no dispatcher, no autograd.");
            },
            PythonEntryOf<DispatchOf<Operator>>::make,
        });
    }

  private:
    torch::Library kernels_;
    torch::Library autograd_;
};

}  // namespace torch_aclnn_ops
