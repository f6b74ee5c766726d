// Autograd functions that Python calls by name.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "eager_calls.h"
#include "python_entry.h"

namespace torch_aclnn_ops {

// Creates an entry point for eager calls with floating-point tensors of these dtypes.
using MakeEntry = py::object (*)(const py::object& fallback, const std::vector<c10::ScalarType>& dtypes);

inline std::map<std::string, MakeEntry>& registered_functions() {
    static std::map<std::string, MakeEntry> functions;
    return functions;
}

// A Function has a name and a static function call(), whose derivative is a raw operator.
template <class Function>
struct RegisterFunction {
    RegisterFunction() { registered_functions()[Function::name] = make_entry; }

  private:
    static py::object make_entry(const py::object& fallback, const std::vector<c10::ScalarType>& dtypes) {
        using Calls = EagerCalls<Function>;
        Calls::dtypes.reset();
        for (const c10::ScalarType dtype : dtypes) {
            Calls::dtypes.set(static_cast<size_t>(dtype));
        }
        return PythonEntry<Function, decltype(&Function::call), Calls>::make(fallback);
    }
};

// Adds the factories to a Python module, as a dict called functions.
inline void define_functions(py::module_& module) {
    parameter_class = py::module_::import("torch.nn").attr("Parameter").cast<py::object>().release().ptr();
    py::dict functions;
    for (const auto& [name, make_entry] : registered_functions()) {
        functions[name.c_str()] = py::cpp_function(
            make_entry, "Make a short entry of the autograd function, for eager calls with all arguments by position.");
    }
    module.attr("functions") = functions;
}

}  // namespace torch_aclnn_ops
