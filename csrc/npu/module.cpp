// The Python module torch_aclnn_ops._C: the kernels as plain functions, and what the package asks about CANN.
#include <acl/acl_rt.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "checks.h"
#include "determinism.h"
#include "dispatch.h"
#include "operators.h"
#include "python_entry.h"
#include "status.h"
#include "symbols.h"

extern "C" const char* aclrtGetSocName() __attribute__((weak));

namespace torch_aclnn_ops {
namespace {

// torch_aclnn_ops._extension sets it: check(operator_name, arguments, values).
PyObject* python_check = nullptr;

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

// Makes an entry for each raw operator and the operator of CANN that computes it.
template <class Value, class Make>
std::map<std::string, Value> of_each(const Make& make) {
    std::map<std::string, Value> entries;
    entries.insert(make.template operator()<MseLossBackward, aclnn::MseLossBackward>());
    entries.insert(make.template operator()<BinaryCrossEntropyBackward, aclnn::BinaryCrossEntropyBackward>());
    entries.insert(make.template operator()<EmbeddingDenseBackward, aclnn::EmbeddingDenseBackward>());
    entries.insert(make.template operator()<FusedLinearOnlineMaxSum, aclnn::FusedLinearOnlineMaxSum>());
    entries.insert(make.template operator()<FusedCrossEntropyLossWithMaxSum, aclnn::FusedCrossEntropyLossWithMaxSum>());
    entries.insert(make.template operator()<FusedLinearCrossEntropyLossGrad, aclnn::FusedLinearCrossEntropyLossGrad>());
    entries.insert(make.template operator()<ApplyFusedEmaAdam, aclnn::ApplyFusedEmaAdam>());
    return entries;
}

template <class Operator>
void define(py::module_& module) {
    module.def(Operator::name, DispatchOf<Operator>::kernel, py::call_guard<py::gil_scoped_release>(),
               "Call the operator on npu tensors directly: no dispatcher, no autograd.");
    module.attr("entries")[Operator::name] =
        py::cpp_function(PythonEntryOf<Operator>::make,
                         "Make a shorter entry of the operator that leaves to torch's what it cannot do.");
}

}  // namespace

void check_in_python(const char* operator_name, std::vector<c10::IValue> arguments, bool values) {
    const py::gil_scoped_acquire gil;
    py::tuple python_arguments(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
        python_arguments[i] = to_python(arguments[i]);
    }
    const auto result = py::reinterpret_steal<py::object>(
        PyObject_CallFunction(python_check, "sOO", operator_name, python_arguments.ptr(), values ? Py_True : Py_False));
    if (!result) {
        python_error error;
        error.persist();
        throw error;
    }
}

PYBIND11_MODULE(_C, module) {
    module.doc() = "CANN's operators on npu tensors. See torch_aclnn_ops.ops for what they compute.";

    python_check = py::cpp_function([](const py::args&) {}).release().ptr();
    module.attr("entries") = py::dict();
    parameter_class = py::module_::import("torch.nn").attr("Parameter").cast<py::object>().release().ptr();
    define<MseLossBackward>(module);
    define<BinaryCrossEntropyBackward>(module);
    define<EmbeddingDenseBackward>(module);
    define<FusedLinearOnlineMaxSum>(module);
    define<FusedCrossEntropyLossWithMaxSum>(module);
    define<FusedLinearCrossEntropyLossGrad>(module);
    define<ApplyFusedEmaAdam>(module);

    module.def(
        "set_check", [](const py::object& check) { python_check = check.inc_ref().ptr(); },
        "Set the function that applies the argument rules: check(operator_name, arguments, values).");
    module.def(
        "check_values", [](bool enabled) { checks_values = enabled; },
        "Check values, such as the range of indices, in every call; this waits for the device.");
    module.def(
        "missing_operators",
        [] {
            return of_each<std::string>(
                []<class Operator, class Api>() { return std::pair{Operator::name, why_missing(Api::name)}; });
        },
        "Say for each raw operator what CANN lacks for it; an empty text if nothing.");
    module.def(
        "launches",
        [] {
            return of_each<int64_t>(
                []<class Operator, class Api>() { return std::pair{Api::name, launches_of<Api>.load()}; });
        },
        "Return how often each of CANN's operators was launched.");
    module.def(
        "soc_name",
        []() -> std::optional<std::string> {
            const char* const name = aclrtGetSocName == nullptr ? nullptr : aclrtGetSocName();
            return name == nullptr ? std::nullopt : std::optional<std::string>(name);
        },
        "Return CANN's name of the chip, such as Ascend910B1, or None.");
    module.def("meaning_of", meaning_of, "Say what a status of an aclnn function means.");
    module.def(
        "library_of_symbol",
        [](const std::string& name, bool through_torch_npu) {
            void* const address =
                through_torch_npu ? find_symbol(name.c_str()) : find_symbol_in_libraries(name.c_str());
            return library_of(address);
        },
        py::arg("name"), py::arg("through_torch_npu") = true,
        "Return the file of the library in which a function of CANN is found, or None.");
    module.def("apply_determinism_to_context", apply_determinism_to_context,
               "Tell CANN's runtime what torch.use_deterministic_algorithms() asks for, without torch_npu.");
}

}  // namespace torch_aclnn_ops
