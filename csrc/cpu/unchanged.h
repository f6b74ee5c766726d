// Fast checks that an optimizer's tensors have not changed since its last step, for thousands of tensors.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>

namespace torch_aclnn_ops {

// Whether lists, tuples and dicts (each key before its value) contain exactly these objects, in this order. Does not
// access the objects, which are mostly not in the cache.
inline bool holds(const pybind11::list& containers, const pybind11::list& objects) {
    Py_ssize_t place = 0;
    const auto is_next = [&](PyObject* object) {
        return place < PyList_GET_SIZE(objects.ptr()) && PyList_GET_ITEM(objects.ptr(), place++) == object;
    };
    for (const pybind11::handle container : containers) {
        if (PyDict_Check(container.ptr())) {
            Py_ssize_t next = 0;
            PyObject *key = nullptr, *value = nullptr;
            while (PyDict_Next(container.ptr(), &next, &key, &value)) {
                if (!is_next(key) || !is_next(value)) {
                    return false;
                }
            }
            continue;
        }
        const auto sequence = pybind11::reinterpret_steal<pybind11::object>(
            PySequence_Fast(container.ptr(), "holds: containers must be lists, tuples and dicts"));
        if (!sequence) {
            throw pybind11::error_already_set();
        }
        PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
            if (!is_next(items[i])) {
                return false;
            }
        }
    }
    return place == PyList_GET_SIZE(objects.ptr());
}

// Whether tensors have these gradients. None of the tensors may be a subclass.
inline bool have_grads(const pybind11::list& tensors, const pybind11::list& grads) {
    if (tensors.size() != grads.size()) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
        PyObject *const tensor = PyList_GET_ITEM(tensors.ptr(), i), *const grad = PyList_GET_ITEM(grads.ptr(), i);
        if (!THPVariable_Check(tensor) || !THPVariable_Check(grad)) {
            throw pybind11::type_error("have_grads: tensors and grads must be lists of Tensors");
        }
        if (!THPVariable_Unpack(tensor).grad().is_same(THPVariable_Unpack(grad))) {
            return false;
        }
    }
    return true;
}

// Returns a hash of the addresses, dtypes, sizes and strides of tensors. None of them may be a subclass.
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
