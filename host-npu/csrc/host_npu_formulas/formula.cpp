#include "host_npu_formulas/formula.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace host_npu {
namespace {

std::optional<at::ScalarType> scalar_type(aclDataType dtype) {
    switch (dtype) {
        case ACL_FLOAT:
            return at::kFloat;
        case ACL_FLOAT16:
            return at::kHalf;
        case ACL_BF16:
            return at::kBFloat16;
        default:
            return std::nullopt;
    }
}

at::IntArrayRef sizes(const Dims& dims) { return {dims.begin(), dims.rank()}; }

}  // namespace

void require_taken(const aclTensor* tensor, std::size_t position, bool may_be_absent) {
    if (tensor == nullptr) {
        require(may_be_absent, kNullPointer, "argument ", position, " is a null pointer");
        return;
    }
    const auto& layout = tensor->layout;
    require(scalar_type(layout.dtype).has_value(), kParamInvalid, "argument ", position, " has dtype ",
            dtype_name(layout.dtype), " instead of float32, float16 or bfloat16");
    require(layout.shape.rank() <= 8, kParamInvalid, "argument ", position, " has more than 8 dimensions");
}

Tensor without_memory(const Layout& layout) {
    return at::empty(sizes(layout.shape), at::TensorOptions(*scalar_type(layout.dtype)).device(at::kMeta));
}

Tensor in_memory(const HostTensor& tensor) {
    if (!tensor) return {};
    return at::from_blob(tensor.data, sizes(tensor->shape), sizes(tensor->strides),
                         at::TensorOptions(*scalar_type(tensor->dtype)));
}

Tensor widened(const Tensor& tensor) { return tensor.to(at::kFloat); }

void Out::operator=(const Tensor& result) const {
    TORCH_CHECK(tensor_.sizes() == result.sizes(), "an output has shape ", tensor_.sizes(), " instead of ",
                result.sizes());
    tensor_.copy_(result);
}

Tensor Out::rounded() const { return widened(tensor_); }

}  // namespace host_npu
