// A faster entry point from Python than torch.ops.torch_aclnn_ops.*, for the package's own calls.
//
// torch.ops parses the schema in every call and boxes the arguments, which costs more than the rest of the call. Here
// the types are known at compile time, and all arguments are positional, in schema order. Unsupported arguments (tensor
// subclasses, other numbers) and calls inside a TorchFunctionMode go to a fallback in Python.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>

namespace torch_aclnn_ops {

namespace py = pybind11;

// torch.nn.Parameter, a subclass of Tensor that overrides nothing.
inline PyObject* parameter_class = nullptr;

inline const at::Tensor* ordinary_tensor(PyObject* object) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == THPVariableClass || type == parameter_class ? &THPVariable_Unpack(object) : nullptr;
}

// Parses one argument; read() returns whether it succeeded.
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

struct AllCalls {
    template <class... Arguments>
    static bool include(const Arguments&...) {
        return true;
    }
};

// Calls that Calls does not include also go to the fallback.
template <class Callee, class Function, class Calls = AllCalls>
struct PythonEntry;

template <class Callee, class Result, class... Parameters, class Calls>
struct PythonEntry<Callee, Result (*)(Parameters...), Calls> {
    // A vectorcall.
    static PyObject* call(PyObject* fallback, PyObject* const* arguments, Py_ssize_t number) {
        HANDLE_TH_ERRORS
        std::tuple<Argument<Parameters>...> values;
        if (number != static_cast<Py_ssize_t>(sizeof...(Parameters)) || at::impl::torch_function_mode_enabled() ||
            !read(arguments, values, std::index_sequence_for<Parameters...>{}) ||
            !std::apply([](const auto&... value) { return Calls::include(value.get()...); }, values)) {
            return PyObject_Vectorcall(fallback, arguments, static_cast<size_t>(number), nullptr);
        }
        return std::apply([](const auto&... value) { return run(value.get()...); }, values);
        END_HANDLE_TH_ERRORS
    }

    static py::object make(const py::object& fallback) {
        static PyMethodDef definition = {
            Callee::name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
        return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, fallback.ptr()));
    }

  private:
    static PyObject* run(Parameters... arguments) {
        if constexpr (std::is_void_v<Result>) {
            const py::gil_scoped_release no_gil;
            Callee::call(arguments...);
        } else {
            return wrap([&] {
                const py::gil_scoped_release no_gil;
                return Callee::call(arguments...);
            }());
        }
        Py_RETURN_NONE;
    }

    template <size_t... index>
    static bool read(PyObject* const* arguments, std::tuple<Argument<Parameters>...>& values,
                     std::index_sequence<index...>) {
        return (std::get<index>(values).read(arguments[index]) && ...);
    }
};

// The entry of a type with a name and a static function call().
template <class Callee>
using PythonEntryOf = PythonEntry<Callee, decltype(&Callee::call)>;

}  // namespace torch_aclnn_ops
