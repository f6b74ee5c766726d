// Autograd functions that Python calls by name.
#pragma once

#include <map>
#include <string>

#include "python_entry.h"

namespace torch_aclnn_ops {

// Makers of entries for Python, by the names of the functions.
inline std::map<std::string, py::object (*)(const py::object& fallback)>& registered_functions() {
    static std::map<std::string, py::object (*)(const py::object& fallback)> functions;
    return functions;
}

// A Function has a name and a static function call(), which differentiates by a raw operator.
template <class Function>
struct RegisterFunction {
    RegisterFunction() { registered_functions()[Function::name] = PythonEntryOf<Function>::make; }
};

// Gives a Python module the makers, as a dict called functions.
inline void define_functions(py::module_& module) {
    parameter_class = py::module_::import("torch.nn").attr("Parameter").cast<py::object>().release().ptr();
    py::dict functions;
    for (const auto& [name, make_entry] : registered_functions()) {
        functions[name.c_str()] = py::cpp_function(
            make_entry, "Make a short entry of the autograd function, with all arguments by position.");
    }
    module.attr("functions") = functions;
}

}  // namespace torch_aclnn_ops
