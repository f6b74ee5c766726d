// Where CANN's functions are: looked up by name at run time, because the extension is built without CANN.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "aclnn_api.h"

namespace torch_aclnn_ops {

// Finds a function of CANN in torch_npu's way, through torch_npu itself if it exports its look-up, else in custom
// packages, vendors' packages and the libraries of CANN. Null if there is none.
void* find_symbol(const char* name);

// Says what is missing for an operator of CANN and what works without it; empty if nothing is missing.
std::string why_missing(const char* operator_name);

struct BaseApi {
    aclnn::CreateTensor* create_tensor;
    aclnn::DestroyTensor* destroy_tensor;
    aclnn::DestroyExecutor* destroy_executor;
    void (*forget_pta_cache)();  // null where CANN does not have it
};
const BaseApi& base_api();

template <class Operator>
struct Functions {
    typename Operator::PhaseOne* phase_one;
    aclnn::PhaseTwo* phase_two;
};

[[noreturn]] void raise_missing(const char* operator_name);
std::string phase_one_name(const char* operator_name);

// The two functions of an operator, looked up once; raises where one is missing.
template <class Operator>
const Functions<Operator>& functions_of() {
    static const Functions<Operator> functions = [] {
        const Functions<Operator> found{
            reinterpret_cast<typename Operator::PhaseOne*>(find_symbol(phase_one_name(Operator::cann).c_str())),
            reinterpret_cast<aclnn::PhaseTwo*>(find_symbol(Operator::cann)),
        };
        if (found.phase_one == nullptr || found.phase_two == nullptr) {
            raise_missing(Operator::cann);
        }
        return found;
    }();
    return functions;
}

// How often the operator was launched in this process.
template <class Operator>
inline std::atomic<int64_t> launches_of = 0;

}  // namespace torch_aclnn_ops
