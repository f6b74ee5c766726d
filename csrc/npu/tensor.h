// Conversions from at::Tensor to aclTensor, and from numbers to aclScalar.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "symbols.h"

namespace torch_aclnn_ops {

struct DestroyAclTensor {
    void operator()(const aclTensor* tensor) const noexcept { base_api().destroy_tensor(tensor); }
};
using AclTensor = std::unique_ptr<aclTensor, DestroyAclTensor>;

struct DestroyAclScalar {
    void operator()(const aclScalar* scalar) const noexcept { base_api().destroy_scalar(scalar); }
};
using AclScalar = std::unique_ptr<aclScalar, DestroyAclScalar>;

// A tensor that the operator writes to in place, which must not be converted to another format.
struct InPlace {
    const at::Tensor& tensor;
};

// Raises unless the tensor is on the device; names the operator's parameter.
void check_device(const at::Tensor& tensor, c10::Device device, const char* operator_name, const char* parameter);

// Whether the tensor has a private format (such as FRACTAL_NZ), in which strides are meaningless.
bool has_private_format(const at::Tensor& tensor);

at::Tensor to_base_format(const at::Tensor& tensor);

// Creates an aclTensor from storage, offset, sizes and strides. Views are not copied.
AclTensor make_acl_tensor(const at::Tensor& tensor);

// Creates an aclScalar of the number's own type.
AclScalar make_acl_scalar(double value);
AclScalar make_acl_scalar(int64_t value);
AclScalar make_acl_scalar(bool value);

// Allocates a contiguous output in a base format on the current device. Faster than at::empty, which calls the same
// function through the dispatcher.
at::Tensor make_output(at::IntArrayRef sizes, const at::TensorOptions& options);

// The device of an operator's first argument, which the other arguments must share.
inline c10::Device device_of_first(const at::Tensor& tensor, const auto&...) { return tensor.device(); }

// Whether this is the current device.
bool is_current(c10::Device device);

// Describes dtype and shape for error messages.
std::string describe(const at::Tensor& tensor);

}  // namespace torch_aclnn_ops
