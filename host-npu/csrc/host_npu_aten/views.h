// CPU tensors over the memory of NPU tensors.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace host_npu {

// Whether the strides of the NPU tensor describe its memory.
bool is_in_base_format(const at::Tensor& tensor);

// The CPU views of an operator's NPU tensors. Views share a storage if their tensors do.
class Views {
  public:
    // Returns a view of an NPU tensor, the same for the same tensor; host tensors are returned unchanged. For a tensor
    // in a private format, whose strides are meaningless, it is a view of a copy in a base format, which is written
    // back if the operator writes to it.
    at::Tensor view(const at::Tensor& tensor, bool may_be_on_host, bool is_written);
    // Throws if host tensors that are not allowed were mixed with NPU tensors.
    void refuse_host_tensors() const;
    // The device of the operator, once a tensor or an argument has determined it.
    const std::optional<c10::Device>& device() const { return device_; }
    void set_device(c10::Device device);

    // Updates NPU tensors whose views were resized, and writes copies back to tensors in a private format.
    void write_back();

    // Returns the NPU tensor for a result of the CPU kernel. copy_results() fills it if it is new.
    at::Tensor result(const at::Tensor& on_host);
    void copy_results();

  private:
    struct SharedStorage {
        c10::Storage on_device;
        c10::Storage on_host;
        const void* alias;
    };
    struct View {
        at::Tensor on_device;
        at::Tensor on_host;
        // The address of both storages, unless the operator has reallocated its view.
        const void* alias;
    };

    // A tensor in a private format and its copy in a base format.
    struct Converted {
        at::Tensor original;
        at::Tensor copy;
        bool is_written;
    };

    // Returns the tensor, or its copy if it is in a private format.
    at::Tensor in_base_format(const at::Tensor& tensor, bool is_written);
    const SharedStorage& host_storage(const at::Tensor& tensor);
    at::Tensor original_of(const at::Tensor& on_host) const;
    at::Tensor new_on_device(const at::Tensor& on_host);

    bool has_host_tensor_ = false;
    std::optional<c10::Device> device_;
    std::vector<SharedStorage> storages_;
    std::vector<View> views_;
    std::vector<Converted> converted_;
    // New NPU tensors and their contents.
    std::vector<std::pair<at::Tensor, at::Tensor>> new_results_;
};

}  // namespace host_npu
