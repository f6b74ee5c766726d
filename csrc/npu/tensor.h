// From at::Tensor to aclTensor.
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

// A tensor that the operator writes to in place. It must not be replaced by a copy in another format.
struct InPlace {
    const at::Tensor& tensor;
};

// Raises unless the tensor is on the device; names the operator's parameter.
void check_device(const at::Tensor& tensor, c10::Device device, const char* operator_name, const char* parameter);

// Whether the memory is laid out in a private format (such as FRACTAL_NZ), where strides say nothing.
bool has_private_format(const at::Tensor& tensor);

at::Tensor to_base_format(const at::Tensor& tensor);

// Describes the tensor to CANN: base of its storage, offset, sizes and strides. Views pass as they are.
AclTensor make_acl_tensor(const at::Tensor& tensor);

// An output of an operator: contiguous, in a base format, on the current device. Quicker than at::empty, which goes
// through the dispatcher to the same function.
at::Tensor make_output(at::IntArrayRef sizes, const at::TensorOptions& options);

// Whether the current device is this one.
bool is_current(c10::Device device);

// Dtype and shape, for people to read.
std::string describe(const at::Tensor& tensor);

}  // namespace torch_aclnn_ops
