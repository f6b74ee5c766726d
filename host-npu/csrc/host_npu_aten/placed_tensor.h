// NPU tensors in a captured graph.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace host_npu {

// The address and layout of an NPU tensor. Does not own the memory, like a device's graph.
struct PlacedTensor {
    explicit PlacedTensor(const at::Tensor& tensor);

    const void* storage;
    std::size_t bytes;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    std::int64_t offset;
    caffe2::TypeMeta dtype;
    bool is_wrapped_number;
    bool is_conj;
    bool is_neg;
};

// CPU tensors over the memory of the tensors of a call. Tensors that share memory share a storage.
class PlacedViews {
  public:
    // Throws if the tensor's memory has been freed.
    at::Tensor view(const PlacedTensor& tensor);

  private:
    std::map<const void*, c10::Storage> storages_;
};

// Copies values of the same shape into device memory.
void copy_to(const PlacedTensor& tensor, const at::Tensor& values);

// Whether the CPU kernel has reallocated the memory of a view.
bool has_moved(const at::Tensor& view, const PlacedTensor& tensor);

// Whether a view still has the address and layout of the tensor after the kernel.
bool still_matches(const at::Tensor& view, const PlacedTensor& tensor);

}  // namespace host_npu
