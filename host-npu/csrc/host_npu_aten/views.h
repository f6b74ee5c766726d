// CPU tensors over the memory of NPU tensors.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace host_npu {

// Whether strides say where the elements of the NPU tensor are.
bool is_in_base_format(const at::Tensor& tensor);

// The CPU views of one operator's NPU tensors. Tensors that share a storage have views that do.
class Views {
  public:
    // Returns a view of an NPU tensor, the same one for the same tensor, or the tensor itself if it is the host's. Of a
    // tensor in a private format, whose strides say nothing, it is a view of a copy in a base format, which is written
    // back if the operator writes to it.
    at::Tensor view(const at::Tensor& tensor, bool may_be_on_host, bool is_written);
    // Throws if tensors of the host that may not be there came with those of a device.
    void refuse_host_tensors() const;
    // The device of the operator, once a tensor or an argument has named it.
    const std::optional<c10::Device>& device() const { return device_; }
    void set_device(c10::Device device);

    // Gives NPU tensors whose view the operator has resized its size and contents, and those in a private format what
    // was written to their copy.
    void write_back();

    // Returns the NPU tensor that a result of the CPU's kernel stands for. If it is a new one, copy_results() fills it.
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
        // Where the memory of both is, unless the operator moved its view.
        const void* alias;
    };

    // A tensor in a private format, and its copy in a base format.
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
    // New results on the device, and what they are to hold.
    std::vector<std::pair<at::Tensor, at::Tensor>> new_results_;
};

}  // namespace host_npu
