#include "symbols.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

// torch_npu exports its lookup from op-plugin 26.0. Weak, so that the extension also loads with older versions.
void* GetOpApiFuncAddr(const char* name) __attribute__((weak));

namespace torch_aclnn_ops {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        const auto first = part.find_first_not_of(" \t\r");
        if (first != std::string::npos) {
            parts.push_back(part.substr(first, part.find_last_not_of(" \t\r") + 1 - first));
        }
    }
    return parts;
}

std::string environment(const char* variable) {
    const char* const value = std::getenv(variable);
    return value == nullptr ? "" : value;
}

// Returns the vendors in $ASCEND_OPP_PATH/vendors, first those in the line load_priority=first,second.
std::vector<std::string> vendor_packages(const std::string& opp_path) {
    std::vector<std::string> packages;
    std::ifstream config(opp_path + "/vendors/config.ini");
    for (std::string line; std::getline(config, line);) {
        const std::vector<std::string> sides = split(line, '=');
        if (sides.size() == 2 && sides[0] == "load_priority") {
            for (const std::string& vendor : split(sides[1], ',')) {
                packages.push_back(opp_path + "/vendors/" + vendor);
            }
        }
    }
    return packages;
}

std::vector<std::string> split_libraries(const std::string& cann_path) {
    std::vector<std::string> libraries;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(cann_path + "/lib64", ignored)) {
        const std::string file = entry.path().filename();
        if (file.starts_with("libopapi_") && file.ends_with(".so")) {
            libraries.push_back(entry.path());
        }
    }
    std::sort(libraries.begin(), libraries.end());
    return libraries;
}

std::vector<void*> open_libraries() {
    std::vector<std::string> names;
    for (const std::string& package : split(environment("ASCEND_CUSTOM_OPP_PATH"), ':')) {
        names.push_back(package + "/op_api/lib/libcust_opapi.so");
    }
    for (const std::string& package : vendor_packages(environment("ASCEND_OPP_PATH"))) {
        names.push_back(package + "/op_api/lib/libcust_opapi.so");
    }
    for (const std::string& library : split_libraries(environment("ASCEND_HOME_PATH"))) {
        names.push_back(library);
    }
    for (const char* const name : {"libopapi.so", "libaclnn_ops_infer.so", "libaclnn_ops_train.so", "libaclnn_math.so",
                                   "libaclnn_sparse.so", "libaclnn_fft.so", "libaclnn_rand.so", "libnnopbase.so"}) {
        names.push_back(name);
    }
    std::vector<void*> libraries;
    for (const std::string& name : names) {
        if (void* const library = dlopen(name.c_str(), RTLD_LAZY); library != nullptr) {
            libraries.push_back(library);
        }
    }
    return libraries;
}

void* find_symbol_in_libraries(const char* name) {
    static const std::vector<void*> libraries = open_libraries();
    for (void* const library : libraries) {
        if (void* const address = dlsym(library, name); address != nullptr) {
            return address;
        }
    }
    return nullptr;
}

template <class Function>
Function* find_base_function(const char* name) {
    void* const address = find_symbol(name);
    TORCH_CHECK_NOT_IMPLEMENTED(address != nullptr, "torch_aclnn_ops: CANN's libnnopbase.so has no ", name,
                                ", without which no aclnn operator can be called; check the installation of CANN");
    return reinterpret_cast<Function*>(address);
}

}  // namespace

void* find_symbol(const char* name) {
    void* const address = GetOpApiFuncAddr == nullptr ? nullptr : GetOpApiFuncAddr(name);
    return address == nullptr ? find_symbol_in_libraries(name) : address;
}

std::string phase_one_name(const char* operator_name) { return std::string(operator_name) + "GetWorkspaceSize"; }

std::string why_missing(const char* operator_name) {
    std::string missing;
    for (const std::string& name : {phase_one_name(operator_name), std::string(operator_name)}) {
        if (find_symbol(name.c_str()) == nullptr) {
            missing += (missing.empty() ? "" : " and ") + name;
        }
    }
    if (missing.empty()) {
        return missing;
    }
    return "CANN's libraries (libcust_opapi.so, libopapi_*.so, libopapi.so) have no " + missing +
           ": this CANN is too old for the operator, or its package of operators is not installed";
}

void raise_missing(const char* operator_name) {
    C10_THROW_ERROR(NotImplementedError, why_missing(operator_name) +
                                             ". The other operators work, and torch_aclnn_ops.functional, nn and" +
                                             " optim compute this one from its formula on the device");
}

const BaseApi& base_api() {
    static const BaseApi api{
        find_base_function<aclnn::CreateTensor>("aclCreateTensor"),
        find_base_function<aclnn::DestroyTensor>("aclDestroyTensor"),
        find_base_function<aclnn::CreateScalar>("aclCreateScalar"),
        find_base_function<aclnn::DestroyScalar>("aclDestroyScalar"),
        find_base_function<aclnn::DestroyExecutor>("aclDestroyAclOpExecutor"),
        reinterpret_cast<void (*)()>(find_symbol("UnInitPTACacheThreadLocal")),
    };
    return api;
}

}  // namespace torch_aclnn_ops
