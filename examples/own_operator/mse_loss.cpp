// CANN's aclnnMseLoss and aclnnMseLossBackward as operators of PyTorch for NPU tensors: own_operator::mse_loss and
// own_operator::mse_loss_backward, of the squared errors of all elements.
//
// It needs only torch and torch_npu, which pip installs. CANN's operator headers are not needed, because the few
// signatures are declared here. For brevity it does not handle deterministic algorithms, private formats, tensors on
// several devices, and failures of torch_npu's queue; csrc/npu of this repository does.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <acl/acl.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

struct aclTensor;
struct aclOpExecutor;

// torch_npu's lookup, which also searches packages of custom operators. Older versions do not export it.
void* GetOpApiFuncAddr(const char* name) __attribute__((weak));

namespace {

using CreateTensor = aclTensor*(const int64_t* sizes, uint64_t dimensions, aclDataType dtype, const int64_t* strides,
                                int64_t offset, aclFormat format, const int64_t* storage_sizes,
                                uint64_t storage_dimensions, void* data);
using DestroyTensor = int32_t(const aclTensor*);
using PhaseTwo = int32_t(void* workspace, uint64_t workspace_size, aclOpExecutor*, aclrtStream);
using MseLoss = int32_t(const aclTensor* self, const aclTensor* target, int64_t reduction, aclTensor* out,
                        uint64_t* workspace_size, aclOpExecutor**);
using MseLossBackward = int32_t(const aclTensor* grad_output, const aclTensor* self, const aclTensor* target,
                                int64_t reduction, aclTensor* out, uint64_t* workspace_size, aclOpExecutor**);

template <class Function>
Function* find(const std::string& name) {
    static void* const library = dlopen("libopapi.so", RTLD_LAZY);
    void* const found = GetOpApiFuncAddr == nullptr ? dlsym(library, name.c_str()) : GetOpApiFuncAddr(name.c_str());
    TORCH_CHECK_NOT_IMPLEMENTED(found != nullptr, "this CANN has no ", name);
    return reinterpret_cast<Function*>(found);
}

aclDataType acl_dtype(at::ScalarType dtype) {
    const bool is_16_bits = dtype == at::kHalf || dtype == at::kBFloat16;
    TORCH_CHECK_TYPE(is_16_bits || dtype == at::kFloat,
                     "own_operator: tensors must be float32, float16 or bfloat16, but one is ", dtype);
    return dtype == at::kFloat ? ACL_FLOAT : dtype == at::kHalf ? ACL_FLOAT16 : ACL_BF16;
}

// Describes a view without a copy: by its storage, offset, sizes and strides.
std::shared_ptr<aclTensor> describe(const at::Tensor& tensor) {
    static auto* const create = find<CreateTensor>("aclCreateTensor");
    static auto* const destroy = find<DestroyTensor>("aclDestroyTensor");
    const auto storage_size = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
    return {
        create(tensor.sizes().data(), tensor.dim(), acl_dtype(tensor.scalar_type()), tensor.strides().data(),
               tensor.storage_offset(), ACL_FORMAT_ND, &storage_size, 1, const_cast<void*>(tensor.storage().data())),
        destroy};
}

// Calls phase one directly, so that a refusal by CANN is raised by this call, and queues phase two.
template <class PhaseOne, class... Arguments>
void launch(const std::string& name, const Arguments&... arguments) {
    static auto* const phase_one = find<PhaseOne>(name + "GetWorkspaceSize");
    static auto* const phase_two = find<PhaseTwo>(name);
    std::vector<std::shared_ptr<aclTensor>> tensors;
    const auto convert = [&tensors](const auto& argument) {
        if constexpr (std::is_same_v<decltype(argument), const at::Tensor&>) {
            return tensors.emplace_back(describe(argument)).get();
        } else {
            return argument;
        }
    };
    uint64_t workspace_size = 0;
    aclOpExecutor* executor = nullptr;
    const int32_t status = phase_one(convert(arguments)..., &workspace_size, &executor);
    if (status != 0) {
        const char* const message = aclGetRecentErrMsg();
        TORCH_CHECK(false, name, " refuses the call with status ", status, ": ", message == nullptr ? "" : message);
    }
    // Freed when this function returns, while phase two is queued: only later work of the stream reuses the memory.
    c10::DataPtr workspace;
    if (workspace_size > 0) {
        workspace = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(workspace_size);
    }
    // stream(true) would wait for the queue.
    const aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
    at_npu::native::OpCommand::RunOpApiV2(name, [=, data = workspace.get(), tensors = std::move(tensors)] {
        return phase_two(data, workspace_size, executor, stream);
    });
}

constexpr int64_t kNoReduction = 0;

at::Tensor mse_loss(const at::Tensor& input, const at::Tensor& target) {
    const c10::DeviceGuard guard(input.device());
    at::Tensor loss = at::empty(input.sizes(), input.options());
    launch<MseLoss>("aclnnMseLoss", input, target, kNoReduction, loss);
    return loss;
}

at::Tensor mse_loss_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& target) {
    const c10::DeviceGuard guard(input.device());
    at::Tensor grad_input = at::empty(input.sizes(), input.options());
    launch<MseLossBackward>("aclnnMseLossBackward", grad_output, input, target, kNoReduction, grad_input);
    return grad_input;
}

}  // namespace

TORCH_LIBRARY(own_operator, library) {
    library.def("mse_loss(Tensor input, Tensor target) -> Tensor");
    library.def("mse_loss_backward(Tensor grad_output, Tensor input, Tensor target) -> Tensor");
}

TORCH_LIBRARY_IMPL(own_operator, PrivateUse1, library) {
    library.impl("mse_loss", mse_loss);
    library.impl("mse_loss_backward", mse_loss_backward);
}
