// Executors: repeatability, addresses, and destruction.
#include "nnopbase/executor.h"

#include <optional>

#include "nnopbase/phase_cache.h"

namespace host_npu {
namespace {

Pool<aclOpExecutor>& executors() {
    static auto& pool = *new Pool<aclOpExecutor>("aclOpExecutor");
    return pool;
}

bool known(const aclOpExecutor& executor) {
    return executor.magic == kComposedMagic || executor.magic == kCacheWrapperMagic ||
           executor.magic == kIndividualMagic;
}

enum class Side { Input, Output, Any };

// Returns the argument at `index` of an individual executor, or nullopt.
std::optional<std::size_t> argument(const Call& call, Side side, std::size_t index) {
    if (side == Side::Output) {
        const auto& outputs = call.plan.outputs;
        return index < outputs.size() ? std::optional(outputs[index]) : std::nullopt;
    }
    return index < call.layouts.size() && call.layouts[index] ? std::optional(index) : std::nullopt;
}

aclnnStatus set_address(const char* function, Side side, aclOpExecutor* executor, std::size_t index, aclTensor* tensor,
                        void* address) {
    return unless_it_fails(function, [&] {
        if (tensor == nullptr) return failed(kInnerNullPointer, function, "tensor is a null pointer");
        tensor->storage = address;
        if (executor == nullptr) return failed(kInnerNullPointer, function, "executor is a null pointer");
        if (executor->magic != kIndividualMagic) return kSuccess;
        const auto to = executor->call ? argument(*executor->call, side, index) : std::nullopt;
        if (!to) return failed(kParamInvalid, function, "the call has no tensor " + std::to_string(index));
        executor->storages[*to] = address;
        return kSuccess;
    });
}

aclnnStatus set_member_address(const char* function, aclOpExecutor* executor, std::size_t index, aclTensorList* tensors,
                               void* address) {
    return unless_it_fails(function, [&] {
        if (tensors == nullptr) return failed(kInnerNullPointer, function, "tensors is a null pointer");
        if (index >= tensors->members.size() || tensors->members[index] == nullptr) {
            return failed(kParamInvalid, function, "the list has no tensor " + std::to_string(index));
        }
        tensors->members[index]->storage = address;
        if (executor == nullptr) return failed(kInnerNullPointer, function, "executor is a null pointer");
        if (executor->magic != kIndividualMagic) return kSuccess;
        return failed(kParamInvalid, function, "the operator has no list among its arguments");
    });
}

}  // namespace

aclOpExecutor* take_executor(std::uint64_t magic) {
    auto* const executor = executors().take();
    executor->magic = magic;
    return executor;
}

void release(aclOpExecutor* executor) {
    executor->magic = 0;
    executor->call.reset();
    executor->tensors.clear();
    executor->storages.clear();
    executor->repeatable = false;
    executor->cache_entry.reset();
    executor->cache_key.clear();
    executors().give_back(executor);
}

}  // namespace host_npu

using namespace host_npu;

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
    return unless_it_fails(__func__, [executor, function = __func__] {
        if (executor == nullptr) return failed(kInnerNullPointer, function, "executor is null");
        // For the errors below CANN only logs warnings, so aclGetRecentErrMsg has no message.
        if (executor->magic != kComposedMagic && executor->magic != kIndividualMagic) return kInnerError;
        if (executor->call && !executor->call->plan.repeatable) return kInnerError;
        executor->repeatable = true;
        if (executor->cache_entry) PhaseCache::of_this_thread().erase(executor->cache_key);
        executor->cache_entry.reset();
        return kSuccess;
    });
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    return unless_it_fails(__func__, [executor, function = __func__] {
        if (executor == nullptr) return failed(kInnerNullPointer, function, "executor is a null pointer");
        if (!known(*executor)) return failed(kInnerError, function, "this is not an executor, or no longer one");
        release(executor);
        return kSuccess;
    });
}

aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* addr) {
    return set_address(__func__, Side::Input, executor, index, tensor, addr);
}
aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* addr) {
    return set_address(__func__, Side::Output, executor, index, tensor, addr);
}
aclnnStatus aclSetTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* addr) {
    return set_address(__func__, Side::Any, executor, index, tensor, addr);
}
aclnnStatus aclSetDynamicInputTensorAddr(aclOpExecutor* executor, std::size_t, std::size_t relativeIndex,
                                         aclTensorList* tensors, void* addr) {
    return set_member_address(__func__, executor, relativeIndex, tensors, addr);
}
aclnnStatus aclSetDynamicOutputTensorAddr(aclOpExecutor* executor, std::size_t, std::size_t relativeIndex,
                                          aclTensorList* tensors, void* addr) {
    return set_member_address(__func__, executor, relativeIndex, tensors, addr);
}
aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor* executor, std::size_t, std::size_t relativeIndex,
                                    aclTensorList* tensors, void* addr) {
    return set_member_address(__func__, executor, relativeIndex, tensors, addr);
}

// The names in older releases.
#define OLDER_NAME(older, name) decltype(name) older __attribute__((alias(#name)))
OLDER_NAME(AclSetInputTensorAddr, aclSetInputTensorAddr);
OLDER_NAME(AclSetOutputTensorAddr, aclSetOutputTensorAddr);
OLDER_NAME(AclSetTensorAddr, aclSetTensorAddr);
OLDER_NAME(AclSetDynamicInputTensorAddr, aclSetDynamicInputTensorAddr);
OLDER_NAME(AclSetDynamicOutputTensorAddr, aclSetDynamicOutputTensorAddr);
OLDER_NAME(AclSetDynamicTensorAddr, aclSetDynamicTensorAddr);
#undef OLDER_NAME
