// The Python module torch_aclnn_ops._C: the kernels as plain functions, and queries about CANN.
#include <acl/acl_rt.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "checks.h"
#include "ema_adam.h"
#include "embedding.h"
#include "launch.h"
#include "register.h"

extern "C" const char* aclrtGetSocName() __attribute__((weak));

namespace torch_aclnn_ops {
namespace {

// Set by torch_aclnn_ops._extension: check(operator_name, arguments, values), check_chip(operator_name, arguments).
PyObject* python_check = nullptr;
PyObject* python_check_chip = nullptr;

py::object to_python(const c10::IValue& value) {
    if (value.isTensor()) {
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
    }
    if (value.isBool()) {
        return py::bool_(value.toBool());
    }
    if (value.isInt()) {
        return py::int_(value.toInt());
    }
    if (value.isDouble()) {
        return py::float_(value.toDouble());
    }
    return py::none();
}

py::tuple to_python(const std::vector<c10::IValue>& values) {
    py::tuple result(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
        result[i] = to_python(values[i]);
    }
    return result;
}

// Returns the result of a Python function, or rethrows its exception.
py::object checked(PyObject* result) {
    if (result == nullptr) {
        python_error error;
        error.persist();
        throw error;
    }
    return py::reinterpret_steal<py::object>(result);
}

}  // namespace

void check_in_python(const char* operator_name, std::vector<c10::IValue> arguments, bool values) {
    const py::gil_scoped_acquire gil;
    checked(PyObject_CallFunction(python_check, "sOO", operator_name, to_python(arguments).ptr(),
                                  values ? Py_True : Py_False));
}

void check_chip_in_python(const char* operator_name, std::vector<c10::IValue> arguments) {
    const py::gil_scoped_acquire gil;
    checked(PyObject_CallFunction(python_check_chip, "sO", operator_name, to_python(arguments).ptr()));
}

PYBIND11_MODULE(_C, module) {
    module.doc() = "CANN's operators on npu tensors. See torch_aclnn_ops.ops for what they compute.";

    python_check = py::cpp_function([](const py::args&) {}).release().ptr();
    python_check_chip = py::cpp_function([](const py::args&) {}).release().ptr();
    py::dict entries;
    for (const Registered& one : registered()) {
        one.define(module);
        entries[one.name] = py::cpp_function(
            one.make_entry, "Make a short entry of the operator, which takes all arguments by position.");
    }
    module.attr("entries") = entries;
    define_functions(module);
    module.def("apply_fused_ema_adam_list", apply_fused_ema_adam_list, py::call_guard<py::gil_scoped_release>(),
               "Increment the step counts, and call apply_fused_ema_adam_ for lists of npu tensors: phase one of all "
               "calls, then the launches, with one workspace.");

    module.def(
        "set_rules",
        [](const py::object& check, const py::object& check_chip) {
            python_check = check.inc_ref().ptr();
            python_check_chip = check_chip.inc_ref().ptr();
        },
        "Set the functions that apply the argument rules, check(operator_name, arguments, values), and those of the "
        "chip, check_chip(operator_name, arguments).");
    module.def(
        "check_values", [](bool enabled) { checks_values = enabled; },
        "Check values, such as the range of indices, in every call; this waits for the device.");
    module.def("check_queue", check_queue, py::call_guard<py::gil_scoped_release>(),
               "Raise, in the name of a function, if torch_npu's task queue has ended.");
    module.def("skips_padding_wrongly", skips_padding_wrongly,
               "Tell whether the gradient of an embedding of 16 bits, with so many rows, features and weights, goes to "
               "the kernel of CANN that loses rows beside those of padding_idx.");
    module.def(
        "missing_operators",
        [] {
            std::map<std::string, std::string> missing;
            for (const Registered& one : registered()) {
                missing[one.name] = why_missing(one.cann_name);
            }
            return missing;
        },
        "Say for each raw operator what CANN lacks for it; an empty text if nothing.");
    module.def(
        "launches",
        [] {
            std::map<std::string, int64_t> launches;
            for (const Registered& one : registered()) {
                launches[one.cann_name] = one.launches();
            }
            return launches;
        },
        "Return how often each of CANN's operators was launched.");
    module.def(
        "soc_name",
        []() -> std::optional<std::string> {
            const char* const name = aclrtGetSocName == nullptr ? nullptr : aclrtGetSocName();
            return name == nullptr ? std::nullopt : std::optional<std::string>(name);
        },
        "Return CANN's name of the chip, such as Ascend910B1, or None.");
}

}  // namespace torch_aclnn_ops
