// The simulated graph operators (aclop).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ascendcl/operator_objects.h"

namespace host_npu {

struct GraphTensor {
    aclTensorDesc desc;
    aclDataBuffer memory;
};

// A call with copies of its descriptions, which torch_npu destroys after the call.
struct GraphCall {
    std::string name;
    std::vector<GraphTensor> inputs;
    std::vector<GraphTensor> outputs;
    aclopAttr attributes;
    aclrtStream stream;
};

// Enqueues the operator on the stream. Returns the reason if it cannot run.
using GraphOperator = std::optional<std::string> (*)(const GraphCall& call);

// Registers the implementation of an operator. Not thread-safe: call it while a library is loaded.
HOST_NPU_EXPORT void simulate_graph_operator(const char* name, GraphOperator run);

// Marks that the thread is in a function of torch_npu whose graph operators always run, whatever jit_compile is.
class HOST_NPU_EXPORT InSimulatedFunction {
  public:
    InSimulatedFunction();
    ~InSimulatedFunction();
};

// Whether tensors in this format are not stored row by row.
inline bool is_private(aclFormat format) {
    return format == ACL_FORMAT_FRACTAL_NZ || format == ACL_FORMAT_NC1HWC0 || format == ACL_FORMAT_FRACTAL_Z ||
           format == ACL_FRACTAL_Z_3D;
}

// Whether the tensor's format is simulated and its storage has room for every element.
HOST_NPU_EXPORT bool has_places(const aclTensorDesc& desc);

// Copies between two such tensors of the same dtype and shape, in memory that the host can access.
HOST_NPU_EXPORT void copy_elements(const aclTensorDesc& from, const void* source, const aclTensorDesc& to,
                                   void* destination);

// Casts between formats: a copy of a tensor of the same dtype and shape.
std::optional<std::string> run_identity(const GraphCall& call);

}  // namespace host_npu
