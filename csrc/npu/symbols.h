// Lookup of CANN's functions by name at run time, because the extension is built without CANN.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "aclnn_api.h"

namespace torch_aclnn_ops {

// Finds a CANN function as torch_npu does: through torch_npu if it exports its lookup, otherwise in custom packages,
// vendor packages and CANN's libraries. Returns null if it does not exist.
void* find_symbol(const char* name);

// Describes what is missing for a CANN operator, and what works without it; empty if nothing is missing.
std::string why_missing(const char* operator_name);

struct BaseApi {
    aclnn::CreateTensor* create_tensor;
    aclnn::DestroyTensor* destroy_tensor;
    aclnn::CreateScalar* create_scalar;
    aclnn::DestroyScalar* destroy_scalar;
    aclnn::DestroyExecutor* destroy_executor;
    void (*forget_pta_cache)();  // null if CANN does not have it
};
const BaseApi& base_api();

template <class Operator>
struct Functions {
    typename Operator::PhaseOne* phase_one;
    aclnn::PhaseTwo* phase_two;
};

[[noreturn]] void raise_missing(const char* operator_name);
std::string phase_one_name(const char* operator_name);

// Returns the two functions of an operator, which are looked up once. Raises if one is missing.
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

// The number of launches of the operator in this process.
template <class Operator>
inline std::atomic<int64_t> launches_of = 0;

}  // namespace torch_aclnn_ops
