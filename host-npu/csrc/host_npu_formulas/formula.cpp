#include "host_npu_formulas/formula.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "host_npu_formulas/scalar_type.h"

namespace host_npu {
namespace {

at::IntArrayRef sizes(const Dims& dims) { return {dims.begin(), dims.rank()}; }

}  // namespace

Tensor meta_tensor(const aclTensor* tensor) {
    if (tensor == nullptr) return {};
    const auto& layout = tensor->layout;
    return at::empty(sizes(layout.shape), at::TensorOptions(*scalar_type(layout.dtype)).device(at::kMeta));
}

Tensor in_memory(const HostTensor& tensor) {
    if (!tensor) return {};
    return at::from_blob(tensor.data, sizes(tensor->shape), sizes(tensor->strides),
                         at::TensorOptions(*scalar_type(tensor->dtype)));
}

Tensor widened(const Tensor& tensor) { return tensor.to(at::kFloat); }

double number(const aclScalar* scalar) {
    require(scalar != nullptr, kNullPointer, "a scalar is a null pointer");
    const auto type = scalar_type(scalar->dtype);
    if (scalar->dtype == ACL_DOUBLE) return *reinterpret_cast<const double*>(scalar->value.data());
    require(type.has_value(), kParamInvalid, "a scalar has dtype ", dtype_name(scalar->dtype));
    const auto value = at::from_blob(const_cast<std::byte*>(scalar->value.data()), {}, at::TensorOptions(*type));
    return value.to(at::kDouble).item<double>();
}

void Out::operator=(const Tensor& result) const {
    TORCH_CHECK(tensor_.sizes() == result.sizes(), "an output has shape ", tensor_.sizes(), " instead of ",
                result.sizes());
    tensor_.copy_(result);
}

Tensor Out::rounded() const { return widened(tensor_); }

}  // namespace host_npu
