#include "host_npu_aten/placed_tensor.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "ascendcl/device.h"

namespace host_npu {

PlacedTensor::PlacedTensor(const at::Tensor& tensor)
    : storage(tensor.storage().data()),
      bytes(tensor.storage().nbytes()),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      dtype(tensor.dtype()),
      is_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number()),
      is_conj(tensor.is_conj()),
      is_neg(tensor.is_neg()) {}

namespace {

void* alias_of(const PlacedTensor& tensor) {
    return tensor.storage == nullptr ? nullptr : host_alias(tensor.storage, tensor.bytes);
}

}  // namespace

at::Tensor PlacedViews::view(const PlacedTensor& tensor) {
    auto found = storages_.find(tensor.storage);
    if (found == storages_.end()) {
        // Resizable, for operators that resize their out argument; the contents then move out of device memory.
        c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.bytes,
                             c10::DataPtr(alias_of(tensor), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
        found = storages_.emplace(tensor.storage, std::move(storage)).first;
    }
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype);
    auto* const implementation = view.unsafeGetTensorImpl();
    implementation->set_sizes_and_strides(tensor.sizes, tensor.strides, tensor.offset);
    if (tensor.is_wrapped_number) implementation->set_wrapped_number(true);
    view._set_conj(tensor.is_conj);
    view._set_neg(tensor.is_neg);
    return view;
}

void copy_to(const PlacedTensor& tensor, const at::Tensor& values) {
    TORCH_CHECK(values.sizes() == at::IntArrayRef(tensor.sizes), "a result has the shape ", values.sizes(),
                ", and had ", at::IntArrayRef(tensor.sizes), " when the graph was captured");
    if (values.numel() == 0) return;
    if (values.strides() != at::IntArrayRef(tensor.strides) || !values.is_non_overlapping_and_dense()) {
        PlacedViews().view(tensor).copy_(values);
        return;
    }
    const auto first = static_cast<std::size_t>(tensor.offset) * tensor.dtype.itemsize();
    std::memcpy(static_cast<std::byte*>(alias_of(tensor)) + first, values.const_data_ptr(), values.nbytes());
}

bool has_moved(const at::Tensor& view, const PlacedTensor& tensor) { return view.storage().data() != alias_of(tensor); }

bool still_matches(const at::Tensor& view, const PlacedTensor& tensor) {
    return !has_moved(view, tensor) && view.sizes() == at::IntArrayRef(tensor.sizes) &&
           view.strides() == at::IntArrayRef(tensor.strides);
}

}  // namespace host_npu
