// A shorter way from torch.ops.torch_aclnn_ops.* to the dispatcher.
//
// What torch makes of an operator for Python reads the schema in every call and passes the arguments through a stack of
// boxed values, which costs more than all that follows. This entry knows the types when it is compiled. Calls that it
// does not understand (keyword arguments in another order, defaults, tensor subclasses, modes of __torch_function__)
// go to torch's own entry, and so do their errors.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch.h"

namespace torch_aclnn_ops {

namespace py = pybind11;

// torch.nn.Parameter, a subclass of Tensor without a behaviour of its own.
inline PyObject* parameter_class = nullptr;

inline const at::Tensor* ordinary_tensor(PyObject* object) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == THPVariableClass || type == parameter_class ? &THPVariable_Unpack(object) : nullptr;
}

// Reads one argument; read() tells whether it could.
template <class Parameter>
struct Argument;

template <>
struct Argument<const at::Tensor&> {
    const at::Tensor* value = nullptr;
    bool read(PyObject* object) { return (value = ordinary_tensor(object)) != nullptr; }
    const at::Tensor& get() const { return *value; }
};

template <>
struct Argument<const std::optional<at::Tensor>&> {
    std::optional<at::Tensor> value;
    bool read(PyObject* object) {
        if (object == Py_None) {
            return true;
        }
        const at::Tensor* const tensor = ordinary_tensor(object);
        if (tensor != nullptr) {
            value = *tensor;
        }
        return tensor != nullptr;
    }
    const std::optional<at::Tensor>& get() const { return value; }
};

template <>
struct Argument<int64_t> {
    int64_t value = 0;
    bool read(PyObject* object) {
        int overflow = 0;
        value = PyLong_CheckExact(object) ? PyLong_AsLongLongAndOverflow(object, &overflow) : 0;
        return PyLong_CheckExact(object) && overflow == 0;
    }
    int64_t get() const { return value; }
};

template <>
struct Argument<bool> {
    bool value = false;
    bool read(PyObject* object) {
        value = object == Py_True;
        return PyBool_Check(object);
    }
    bool get() const { return value; }
};

template <>
struct Argument<double> {
    double value = 0;
    bool read(PyObject* object) {
        value = PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : 0;
        return PyFloat_CheckExact(object);
    }
    double get() const { return value; }
};

inline PyObject* wrap(at::Tensor&& tensor) { return THPVariable_Wrap(std::move(tensor)); }

template <class... Tensors>
PyObject* wrap(std::tuple<Tensors...>&& tensors) {
    py::tuple result(sizeof...(Tensors));
    [&]<size_t... index>(std::index_sequence<index...>) {
        ((result[index] = py::reinterpret_steal<py::object>(wrap(std::move(std::get<index>(tensors))))), ...);
    }(std::index_sequence_for<Tensors...>{});
    return result.release().ptr();
}

template <class Operator, class Function>
struct PythonEntry;

template <class Operator, class Result, class... Parameters>
struct PythonEntry<Operator, Result (*)(Parameters...)> {
    // A vectorcall: `original` is torch's entry, `names` the names of the last arguments.
    static PyObject* call(PyObject* original, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
        std::tuple<Argument<Parameters>...> values;
        if (at::impl::torch_function_mode_enabled() || !names_are_in_order(positional, names) ||
            !read(arguments, values, std::index_sequence_for<Parameters...>{})) {
            return PyObject_Vectorcall(original, arguments, static_cast<size_t>(positional), names);
        }
        HANDLE_TH_ERRORS
        return std::apply([](const auto&... value) { return run(value.get()...); }, values);
        END_HANDLE_TH_ERRORS
    }

    // Makes the entry that takes the place of torch's.
    static py::object make(const py::object& original) {
        static PyMethodDef definition = {Operator::name,
                                         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                                         METH_FASTCALL | METH_KEYWORDS, nullptr};
        return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, original.ptr()));
    }

  private:
    static PyObject* run(Parameters... arguments) {
        if constexpr (std::is_void_v<Result>) {
            const py::gil_scoped_release no_gil;
            Dispatch<Operator, Result (*)(Parameters...)>::handle().call(arguments...);
        } else {
            return wrap([&] {
                const py::gil_scoped_release no_gil;
                return Dispatch<Operator, Result (*)(Parameters...)>::handle().call(arguments...);
            }());
        }
        Py_RETURN_NONE;
    }

    template <size_t... index>
    static bool read(PyObject* const* arguments, std::tuple<Argument<Parameters>...>& values,
                     std::index_sequence<index...>) {
        return (std::get<index>(values).read(arguments[index]) && ...);
    }

    // Whether all arguments are given, those by name in the schema's order and only where it wants names or allows
    // them.
    static bool names_are_in_order(Py_ssize_t positional, PyObject* names) {
        const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
        if (positional + named != static_cast<Py_ssize_t>(sizeof...(Parameters)) || positional > max_positional()) {
            return false;
        }
        for (Py_ssize_t i = 0; i < named; ++i) {
            if (PyTuple_GET_ITEM(names, i) != interned_names()[positional + i].ptr()) {
                return false;
            }
        }
        return true;
    }

    static const std::vector<py::object>& interned_names() {
        static const auto* const names = new std::vector<py::object>([] {
            std::vector<py::object> result;
            for (const c10::Argument& argument : schema().arguments()) {
                result.push_back(
                    py::reinterpret_steal<py::object>(PyUnicode_InternFromString(argument.name().c_str())));
            }
            return result;
        }());
        return *names;
    }

    static Py_ssize_t max_positional() {
        static const Py_ssize_t count =
            std::count_if(schema().arguments().begin(), schema().arguments().end(),
                          [](const c10::Argument& argument) { return !argument.kwarg_only(); });
        return count;
    }

    static const c10::FunctionSchema& schema() {
        return Dispatch<Operator, Result (*)(Parameters...)>::handle().schema();
    }
};

template <class Operator>
using PythonEntryOf = PythonEntry<Operator, decltype(&Operator::run)>;

}  // namespace torch_aclnn_ops
