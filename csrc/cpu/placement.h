// Where tensors lie, in one number, for checks of thousands of tensors in every step of an optimizer.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>

namespace torch_aclnn_ops {

// A hash of the addresses, dtypes, sizes and strides of tensors, none of which is a subclass.
inline uint64_t placement(const pybind11::list& tensors) {
    uint64_t hash = tensors.size();
    const auto mix = [&hash](uint64_t value) {
        hash = (hash ^ value) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 29;
    };
    for (const pybind11::handle object : tensors) {
        if (!THPVariable_Check(object.ptr())) {
            throw pybind11::type_error("placement: tensors must be a list of Tensors");
        }
        const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
        mix(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
        mix(static_cast<uint64_t>(tensor.scalar_type()));
        mix(static_cast<uint64_t>(tensor.dim()));
        for (int64_t i = 0; i < tensor.dim(); ++i) {
            mix(static_cast<uint64_t>(tensor.size(i)));
            mix(static_cast<uint64_t>(tensor.stride(i)));
        }
    }
    return hash;
}

}  // namespace torch_aclnn_ops
