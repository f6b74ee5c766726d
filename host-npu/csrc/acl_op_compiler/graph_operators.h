// The graph operators (aclop) that are simulated, by their names.
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

// torch_npu destroys its objects after the call, so this has copies of them.
struct GraphCall {
    std::string name;
    std::vector<GraphTensor> inputs;
    std::vector<GraphTensor> outputs;
    aclopAttr attributes;
    aclrtStream stream;
};

// Puts the operator on the stream; returns why it cannot be run, if so.
using GraphOperator = std::optional<std::string> (*)(const GraphCall& call);

// Lets an operator of the name be run by a function. Call it while a library is loaded.
HOST_NPU_EXPORT void simulate_graph_operator(const char* name, GraphOperator run);

// A function of torch_npu whose graph operators are simulated, also at jit_compile=False, while the thread is in it.
class HOST_NPU_EXPORT InSimulatedFunction {
  public:
    InSimulatedFunction();
    ~InSimulatedFunction();
};

// Whether tensors in this format are stored in another order than their rows.
inline bool is_private(aclFormat format) {
    return format == ACL_FORMAT_FRACTAL_NZ || format == ACL_FORMAT_NC1HWC0 || format == ACL_FORMAT_FRACTAL_Z ||
           format == ACL_FRACTAL_Z_3D;
}

// Whether the tensor's format is simulated and has a place for every element.
HOST_NPU_EXPORT bool has_places(const aclTensorDesc& desc);

// Copies between two such tensors of the same dtype and shape, from and to memory that the host can access.
HOST_NPU_EXPORT void copy_elements(const aclTensorDesc& from, const void* source, const aclTensorDesc& to,
                                   void* destination);

// Casts between formats: a copy of a tensor of the same dtype and shape.
std::optional<std::string> run_identity(const GraphCall& call);

}  // namespace host_npu
