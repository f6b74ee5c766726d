// The life cycle of a call, shared by all operators:
//
//     HOST_NPU_PHASE_TWO(aclnnX, kApi)
//     HOST_NPU_PHASE_ONE aclnnXGetWorkspaceSize(const aclTensor* a, std::int64_t n, ..., aclOpExecutor** executor) {
//         return PhaseOne(kApi, workspaceSize, executor).with(a, n, ...).run([&] { checks; return Plan{...}; });
//     }
//
// Nothing else declares the two functions: build.py generates headers from these definitions.
#pragma once

#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "nnopbase/call.h"
#include "nnopbase/executor.h"

namespace host_npu {

// The exported names of an operator's two functions.
struct Api {
    const char* phase_two;
    const char* phase_one;
};

class HOST_NPU_EXPORT PhaseOne {
  public:
    PhaseOne(const Api& api, std::uint64_t* workspace_size, aclOpExecutor** executor);

    // Records the arguments of the call, which form the cache key.
    template <class... Arguments>
    PhaseOne& with(const Arguments&... arguments) {
        (add(arguments), ...);
        return *this;
    }

    // For composed operators. `build` checks the arguments, throws a Refusal or returns a Plan.
    template <class Build>
    aclnnStatus run(const Build& build) {
        return run(&build, [](const void* object) { return (*static_cast<const Build*>(object))(); });
    }

    // For individual operators, whose generated code checks less. `names` are the names of the tensors, all required.
    template <class Build>
    aclnnStatus run_individual(std::initializer_list<const char*> names, const Build& build) {
        if (const auto done = begin_individual(names)) return *done;
        return guarded([&] { return finish_individual(build()); });
    }

  private:
    // Operator-independent code is compiled once, not for each of hundreds of operators.
    aclnnStatus run(const void* object, Plan (*build)(const void* object));
    void add(const aclTensor* tensor);
    void add(const aclTensorList* list);
    void add(const aclIntArray* array);
    void add(const aclBoolArray* array);
    void add(const aclScalar* scalar);
    void add(const char* text);
    template <class Value>
        requires std::is_arithmetic_v<Value>
    void add(Value value) {
        append(&value, sizeof value);
    }
    void append(const void* bytes, std::size_t size);

    template <class Object>
    void note_if_destroyed(const Object* object) {
        has_destroyed_ = has_destroyed_ || (object != nullptr && !object->alive);
    }

    std::optional<aclnnStatus> begin();
    aclnnStatus finish(Plan plan);
    std::optional<aclnnStatus> begin_individual(std::initializer_list<const char*> names);
    aclnnStatus finish_individual(Plan plan);
    aclnnStatus refuse(aclnnStatus status, const std::string& text);

    std::shared_ptr<const Call> compiled(Plan plan) const;
    std::vector<void*> storages() const;
    bool all_contiguous() const;

    template <class Step>
    aclnnStatus guarded(const Step& step) {
        try {
            return step();
        } catch (const Refusal& refusal) {
            return refuse(refusal.status, refusal.text);
        } catch (const std::exception& error) {
            return refuse(kInnerError, error.what());
        }
    }

    const Api& api_;
    std::uint64_t* workspace_size_;
    aclOpExecutor** executor_;
    // Per-thread buffers, so that calls do not allocate.
    std::string& key_;
    std::vector<const aclTensor*>& tensors_;
    bool has_destroyed_ = false;
    aclOpExecutor* individual_ = nullptr;
};

HOST_NPU_EXPORT aclnnStatus phase_two(const Api& api, void* workspace, std::uint64_t workspace_size,
                                      aclOpExecutor* executor, aclrtStream stream);

// Declares the `Api` of an operator and defines its phase two, which is the same for all operators.
#define HOST_NPU_PHASE_TWO(function, api)                                                                         \
    static constexpr host_npu::Api api{#function, #function "GetWorkspaceSize"};                                  \
    extern "C" HOST_NPU_EXPORT aclnnStatus function(void* workspace, std::uint64_t size, aclOpExecutor* executor, \
                                                    aclrtStream stream) {                                         \
        return host_npu::phase_two(api, workspace, size, executor, stream);                                       \
    }
#define HOST_NPU_PHASE_ONE extern "C" HOST_NPU_EXPORT aclnnStatus

}  // namespace host_npu
