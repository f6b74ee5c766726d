#include "host_npu_aten/views.h"

#include <c10/core/CPUAllocator.h>
#include <torch_npu/csrc/core/npu/NPUFormat.h>

#include <cstring>

#include "acl/acl_base.h"
#include "ascendcl/device.h"
#include "host_npu_aten/drain.h"
#include "opapi/chip.h"

namespace host_npu {
namespace {

void* alias_of(const void* pointer) { return pointer == nullptr ? nullptr : host_alias(pointer); }

// Returns the tensor itself if it is dense, so that the device tensor keeps its strides.
at::Tensor without_gaps(const at::Tensor& tensor) {
    return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

// All chips can allocate and copy such tensors, but only some compute with them.
void require_dtype_of_chip(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.scalar_type() != at::kBFloat16 || has_bfloat16(),
                "a tensor has dtype bfloat16, which this chip does not have");
}

// Copies raw memory between tensors with the same sizes and strides.
void copy_memory(const at::Tensor& on_device, const at::Tensor& on_host) {
    if (on_host.numel() == 0) return;
    std::memcpy(host_alias(on_device.const_data_ptr()), on_host.const_data_ptr(), on_host.nbytes());
}

}  // namespace

bool is_in_base_format(const at::Tensor& tensor) {
    switch (at_npu::native::get_npu_format(tensor)) {
        case ACL_FORMAT_ND:
        case ACL_FORMAT_NCHW:
        case ACL_FORMAT_NHWC:
        case ACL_FORMAT_NCDHW:
        case ACL_FORMAT_NCL:
            return true;
        default:
            return false;
    }
}

at::Tensor Views::in_base_format(const at::Tensor& tensor, bool is_written) {
    if (is_in_base_format(tensor)) return tensor;
    for (auto& known : converted_) {
        if (!known.original.is_same(tensor)) continue;
        known.is_written |= is_written;
        return known.copy;
    }
    return converted_.emplace_back(tensor, at_npu::native::npu_format_cast(tensor, ACL_FORMAT_ND), is_written).copy;
}

void Views::set_device(c10::Device device) {
    if (!device_) device_ = device;
    TORCH_CHECK(*device_ == device, "Expected all tensors to be on the same device, but found at least two devices, ",
                *device_, " and ", device, "!");
}

const Views::SharedStorage& Views::host_storage(const at::Tensor& tensor) {
    const auto& on_device = tensor.storage();
    for (const auto& known : storages_) {
        if (known.on_device.is_alias_of(on_device)) return known;
    }
    void* const alias = alias_of(on_device.data());
    // Resizable, for operators that resize their out argument; the contents then move out of device memory.
    c10::Storage on_host(c10::Storage::use_byte_size_t{}, on_device.nbytes(),
                         c10::DataPtr(alias, c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
    return storages_.emplace_back(SharedStorage{on_device, std::move(on_host), alias});
}

at::Tensor Views::view(const at::Tensor& argument, bool may_be_on_host, bool is_written) {
    if (!argument.defined()) return argument;
    if (!argument.is_privateuseone()) {
        has_host_tensor_ |= (argument.dim() > 0 || is_written) && !may_be_on_host;
        return argument;
    }
    set_device(argument.device());
    require_dtype_of_chip(argument);
    const auto tensor = in_base_format(argument, is_written);
    // The same tensor gets the same view: a kernel checks whether its output is an input, which it must not resize.
    for (const auto& known : views_) {
        if (known.on_device.is_same(tensor)) return known.on_host;
    }
    const auto& memory = host_storage(tensor);
    auto on_host = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.on_host),
                                                            c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* const implementation = on_host.unsafeGetTensorImpl();
    implementation->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
    // The CPU kernels of matrix products and a few others read these two bits.
    on_host._set_conj(tensor.is_conj());
    on_host._set_neg(tensor.is_neg());
    views_.push_back({tensor, on_host, memory.alias});
    return on_host;
}

void Views::refuse_host_tensors() const {
    TORCH_CHECK(!has_host_tensor_ || !device_,
                "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                " and cpu!");
}

void Views::write_back() {
    for (const auto& [on_device, on_host, alias] : views_) {
        const bool has_moved = on_host.storage().data() != alias;
        if (!has_moved && on_host.sizes() == on_device.sizes() && on_host.strides() == on_device.strides()) continue;
        const auto source = without_gaps(on_host);
        on_device.resize_(source.sizes());
        if (source.strides() != on_device.strides()) on_device.as_strided_(source.sizes(), source.strides());
        if (!has_moved) continue;
        // resize_ moves the old contents on the stream, which must happen before the new ones are written.
        drain(*device_);
        copy_memory(on_device, source);
    }
    for (const auto& [original, copy, is_written] : converted_) {
        if (!is_written) continue;
        if (original.sizes() != copy.sizes()) original.resize_(copy.sizes());
        original.copy_(copy);
    }
}

at::Tensor Views::original_of(const at::Tensor& on_host) const {
    for (const auto& view : views_) {
        if (!view.on_host.is_same(on_host)) continue;
        for (const auto& [original, copy, is_written] : converted_) {
            if (copy.is_same(view.on_device)) return original;
        }
        return view.on_device;
    }
    // Operators may return an alias of an argument with another shape.
    for (const auto& view : views_) {
        if (on_host.has_storage() && view.on_host.storage().is_alias_of(on_host.storage())) {
            return at::as_strided(view.on_device, on_host.sizes(), on_host.strides(), on_host.storage_offset());
        }
    }
    return {};
}

at::Tensor Views::new_on_device(const at::Tensor& on_host) {
    const auto layout = on_host.layout();
    if (layout == at::kSparse) {
        return at::_sparse_coo_tensor_unsafe(new_on_device(on_host._indices()), new_on_device(on_host._values()),
                                             on_host.sizes(), on_host.scalar_type(), layout, *device_, std::nullopt,
                                             on_host.is_coalesced());
    }
    if (layout != at::kStrided) {
        const bool has_rows = layout == at::kSparseCsr || layout == at::kSparseBsr;
        return at::_sparse_compressed_tensor_unsafe(
            new_on_device(has_rows ? on_host.crow_indices() : on_host.ccol_indices()),
            new_on_device(has_rows ? on_host.col_indices() : on_host.row_indices()), new_on_device(on_host.values()),
            on_host.sizes(), on_host.scalar_type(), layout, *device_, std::nullopt);
    }
    require_dtype_of_chip(on_host);
    const auto options = on_host.options().device(*device_).pinned_memory(false);
    const auto source = without_gaps(on_host.resolve_conj().resolve_neg());
    auto on_device = at::empty_strided(source.sizes(), source.strides(), options);
    new_results_.emplace_back(on_device, source);
    return on_device;
}

at::Tensor Views::result(const at::Tensor& on_host) {
    if (!on_host.defined() || !device_) return on_host;
    auto original = original_of(on_host);
    return original.defined() ? original : new_on_device(on_host);
}

void Views::copy_results() {
    if (new_results_.empty()) return;
    // The memory of the results may have just been freed by another thread, and still be used by work on the stream.
    drain(*device_);
    for (const auto& [on_device, source] : new_results_) copy_memory(on_device, source);
    new_results_.clear();
}

}  // namespace host_npu
