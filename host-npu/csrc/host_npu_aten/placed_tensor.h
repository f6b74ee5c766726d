// NPU tensors in a captured graph.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace host_npu {

// Where an NPU tensor is and how it lies there. It does not keep the memory, as a device's graph does not.
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

// The CPU tensors over the memory of one call's tensors. Those that share memory share a storage.
class PlacedViews {
  public:
    // Throws if the tensor's memory is no longer there.
    at::Tensor view(const PlacedTensor& tensor);

  private:
    std::map<const void*, c10::Storage> storages_;
};

// Copies values of the same shape into device memory.
void copy_to(const PlacedTensor& tensor, const at::Tensor& values);

// Whether the CPU's kernel has given a view other memory.
bool has_moved(const at::Tensor& view, const PlacedTensor& tensor);

// Whether a view, as the kernel has left it, is still where and how the tensor is.
bool still_matches(const at::Tensor& view, const PlacedTensor& tensor);

}  // namespace host_npu
