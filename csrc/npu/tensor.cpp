#include "tensor.h"

#include <torch_npu/csrc/core/npu/NPUFormat.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/framework/utils/OpPreparation.h>

#include <sstream>

namespace torch_aclnn_ops {
namespace {

aclDataType acl_dtype(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return ACL_FLOAT;
        case at::kHalf:
            return ACL_FLOAT16;
        case at::kBFloat16:
            return ACL_BF16;
        case at::kDouble:
            return ACL_DOUBLE;
        case at::kLong:
            return ACL_INT64;
        case at::kInt:
            return ACL_INT32;
        case at::kShort:
            return ACL_INT16;
        case at::kChar:
            return ACL_INT8;
        case at::kByte:
            return ACL_UINT8;
        case at::kBool:
            return ACL_BOOL;
        case at::kComplexFloat:
            return ACL_COMPLEX64;
        case at::kComplexDouble:
            return ACL_COMPLEX128;
        default:
            C10_THROW_ERROR(TypeError, std::string("torch_aclnn_ops: CANN has no ") + c10::toString(dtype));
    }
}

// The format that torch_npu gives to a tensor of this rank, and that CANN's operators expect.
aclFormat format_of_rank(int64_t rank) {
    switch (rank) {
        case 3:
            return ACL_FORMAT_NCL;
        case 4:
            return ACL_FORMAT_NCHW;
        case 5:
            return ACL_FORMAT_NCDHW;
        default:
            return ACL_FORMAT_ND;
    }
}

AclScalar make_acl_scalar_of(void* value, aclDataType dtype) {
    AclScalar handle(base_api().create_scalar(value, dtype));
    TORCH_CHECK(handle != nullptr, "torch_aclnn_ops: aclCreateScalar made no scalar");
    return handle;
}

}  // namespace

void check_device(const at::Tensor& tensor, c10::Device device, const char* operator_name, const char* parameter) {
    TORCH_CHECK(tensor.device() == device, operator_name, ": all tensors must be on ", device,
                ", the device of the first, but ", parameter, " is on ", tensor.device());
}

bool has_private_format(const at::Tensor& tensor) {
    switch (at_npu::native::get_npu_format(tensor)) {
        case ACL_FORMAT_ND:
        case ACL_FORMAT_NCHW:
        case ACL_FORMAT_NHWC:
        case ACL_FORMAT_NCDHW:
        case ACL_FORMAT_NCL:
            return false;
        default:
            return true;
    }
}

at::Tensor to_base_format(const at::Tensor& tensor) { return at_npu::native::npu_format_cast(tensor, ACL_FORMAT_ND); }

AclTensor make_acl_tensor(const at::Tensor& tensor) {
    const at::Storage& storage = tensor.storage();
    const int64_t storage_size = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
    // CANN also takes pointers to non-const for inputs.
    AclTensor handle(base_api().create_tensor(
        tensor.sizes().data(), tensor.dim(), acl_dtype(tensor.scalar_type()), tensor.strides().data(),
        tensor.storage_offset(), format_of_rank(tensor.dim()), &storage_size, 1, const_cast<void*>(storage.data())));
    TORCH_CHECK(handle != nullptr, "torch_aclnn_ops: aclCreateTensor made no tensor of ", describe(tensor));
    return handle;
}

AclScalar make_acl_scalar(double value) { return make_acl_scalar_of(&value, ACL_DOUBLE); }
AclScalar make_acl_scalar(int64_t value) { return make_acl_scalar_of(&value, ACL_INT64); }
AclScalar make_acl_scalar(bool value) { return make_acl_scalar_of(&value, ACL_BOOL); }

at::Tensor make_output(at::IntArrayRef sizes, const at::TensorOptions& options) {
    return at_npu::native::OpPreparation::apply_tensor_without_format(sizes, options);
}

bool is_current(c10::Device device) { return c10_npu::current_device() == device.index(); }

std::string describe(const at::Tensor& tensor) {
    std::ostringstream text;
    text << c10::toString(tensor.scalar_type()) << tensor.sizes();
    return text.str();
}

}  // namespace torch_aclnn_ops
