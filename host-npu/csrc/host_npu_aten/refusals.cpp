#include "host_npu_aten/refusals.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch_npu/csrc/aten/CustomFunctions.h>
#include <torch_npu/csrc/core/npu/NPUFormat.h>

#include "host_npu_aten/views.h"

namespace host_npu {
namespace {

using c10::DispatchKey;

// The kernel of torch_npu; first called before it is replaced.
const auto& read_of_torch_npu() {
    static const auto kernel = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("aten::_local_scalar_dense", "")
                                   .getComputedKernelForDispatchKey(DispatchKey::PrivateUse1);
    return kernel;
}

// aten::_local_scalar_dense, which reads the element at the offset that the strides give.
void read_number(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& tensor = torch::jit::peek(*stack, 0, 1).toTensor();
    TORCH_CHECK(tensor.storage_offset() == 0 || is_in_base_format(tensor),
                "torch_npu reads a wrong number from a part of a tensor in a private format (",
                at_npu::native::get_npu_format(tensor), "): cast it by torch_npu.npu_format_cast(tensor, 2) first");
    read_of_torch_npu().callBoxed(op, keys, stack);
}

// aten::copy_. torch_npu's kernel writes a part of a tensor in a private format to the beginning of the tensor.
at::Tensor& copy(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source, bool non_blocking) {
    if (!self.is_privateuseone() || is_in_base_format(self)) {
        const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect);
        return at::_ops::copy_::redispatch(keys & after, self, source, non_blocking);
    }
    const auto rows = at_npu::native::npu_format_cast(self, ACL_FORMAT_ND);
    rows.copy_(source);
    return at_npu::native::custom_ops::npu_format_cast_(self, rows);
}

// Whether aten::copy_ ignores that the destination is a conjugate. A device copies between two conjugates correctly.
bool loses_conjugate(const at::Tensor& self, const at::Tensor& source) {
    if (!self.is_conj() || !source.is_complex()) return false;
    return self.is_privateuseone() ? !source.is_conj() : source.is_privateuseone();
}

// aten::copy_, if a tensor is a conjugate. Copies of subclasses and of traced tensors are dispatched here again.
at::Tensor& copy_conjugate(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source, bool non_blocking) {
    TORCH_CHECK(keys.has(DispatchKey::Python) || !loses_conjugate(self, source),
                "torch_npu does not conjugate what is written to a conjugate such as x.conj(): write to x itself, or "
                "to x.conj().resolve_conj()");
    const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, DispatchKey::Conjugate);
    return at::_ops::copy_::redispatch(keys & after, self, source, non_blocking);
}

// torch_npu would raise "AclrtHostRegister failed", without the runtime's message.
void refuse_swapped_memory(const c10::OperatorHandle&, torch::jit::Stack*) {
    TORCH_CHECK(false,
                "the host NPU does not simulate empty_with_swapped_memory, device addresses of host memory: use "
                "torch.empty(..., device=\"npu\")");
}

}  // namespace

void register_refusals(torch::Library& kernels) {
    read_of_torch_npu();
    kernels.impl("_local_scalar_dense", torch::CppFunction::makeFromBoxedFunction<&read_number>());
    static auto& conjugates =
        *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::Conjugate, __FILE__, __LINE__);
    conjugates.impl("copy_", TORCH_FN(copy_conjugate));
    static auto& copies =
        *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::BackendSelect, __FILE__, __LINE__);
    copies.impl("copy_", TORCH_FN(copy));
    static auto& without_tensors =
        *new torch::Library(torch::Library::IMPL, "npu", DispatchKey::BackendSelect, __FILE__, __LINE__);
    without_tensors.impl("empty_with_swapped_memory",
                         torch::CppFunction::makeFromBoxedFunction<&refuse_swapped_memory>());
}

}  // namespace host_npu
