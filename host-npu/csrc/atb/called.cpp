#include "atb/called.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace atb {
namespace {

struct Called : Computed {
    using Computed::Computed;
    // The arguments of the call that created the operation, until a run takes them.
    std::optional<VariantPack> first;
};

// The arguments of the next run on this thread, and its operation.
thread_local VariantPack given;
thread_local const Operation* of_given = nullptr;

// Expects contiguous memory: torch_npu copies other tensors.
Tensor tensor_of(const aclTensor* tensor, bool is_on_host) {
    const auto& layout = tensor->layout;
    Tensor made;
    made.desc.dtype = layout.dtype;
    made.desc.format = layout.format;
    made.desc.shape.rank = layout.shape.rank();
    std::copy(layout.shape.begin(), layout.shape.end(), made.desc.shape.dims.begin());
    const auto dtype = host_npu::scalar_type(layout.dtype);
    const auto element = dtype ? c10::elementSize(*dtype) : 0;
    made.size = static_cast<std::uint64_t>(layout.numel()) * element;
    auto* const data = static_cast<char*>(tensor->storage) + layout.offset * static_cast<std::int64_t>(element);
    (is_on_host ? made.host_data : made.device_data) = data;
    return made;
}

}  // namespace

int begin(std::initializer_list<const aclTensor*> inputs, std::initializer_list<const aclTensor*> on_host,
          std::initializer_list<const aclTensor*> outputs, const char* name, const Formula& formula,
          std::uint64_t* workspace_size, Operation** operation) {
    given = {};
    *workspace_size = 0;
    for (const auto* tensor : inputs) {
        if (tensor != nullptr)
            given.inputs.push_back(tensor_of(tensor, std::ranges::find(on_host, tensor) != on_host.end()));
    }
    for (const auto* tensor : outputs) {
        if (tensor != nullptr) given.outputs.push_back(tensor_of(tensor, false));
    }
    if (*operation == nullptr) {
        auto* const made = new Called(name, formula);
        made->first = given;
        *operation = made;
    }
    of_given = *operation;
    return 0;
}

int run(Operation* operation, Context* context) {
    const auto first = std::exchange(static_cast<Called*>(operation)->first, std::nullopt);
    if (std::exchange(of_given, nullptr) == operation) return operation->Execute(given, nullptr, 0, context);
    TORCH_CHECK(first, "an operation of ATB was run without the call that gives its tensors");
    return operation->Execute(*first, nullptr, 0, context);
}

}  // namespace atb
