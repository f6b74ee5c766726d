#include "nnopbase/two_phase.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "nnopbase/containers.h"
#include "nnopbase/phase_cache.h"

namespace host_npu {
namespace {

thread_local std::string scratch_key;
thread_local std::vector<const aclTensor*> scratch_tensors;

// Releases an executor on every path unless it is repeatable.
class Consumed {
  public:
    explicit Consumed(aclOpExecutor* executor) : executor_(executor) {}
    Consumed(const Consumed&) = delete;
    Consumed& operator=(const Consumed&) = delete;
    ~Consumed() {
        if (!executor_->repeatable) release(executor_);
    }

  private:
    aclOpExecutor* executor_;
};

// The last failure of phase one. torch_npu's macro for extensions ignores it and calls phase two without an executor,
// on another thread; only the error of phase two ends its queue and is raised.
class LastRefusal {
  public:
    void set(const Api& api, const std::string& text) {
        const std::lock_guard lock(mutex_);
        phase_one_ = api.phase_one;
        text_ = text;
    }

    std::string of(const Api& api) {
        const std::lock_guard lock(mutex_);
        return phase_one_ == api.phase_one ? "; " + phase_one_ + " failed last with: " + text_ : "";
    }

  private:
    std::mutex mutex_;
    std::string phase_one_;
    std::string text_;
};

LastRefusal& last_refusal() {
    static auto& refusal = *new LastRefusal;  // Threads may outlive static objects.
    return refusal;
}

aclnnStatus run_individual(const Api& api, void* workspace, std::uint64_t workspace_size, aclOpExecutor* executor,
                           aclrtStream stream) {
    // Errors keep the executor alive: only a run returns it to the pool.
    if (workspace_size > 0 && workspace == nullptr) return failed(kNullPointer, api.phase_two, "workspace is null");
    if (!executor->call) return failed(kInnerError, api.phase_two, "phase one did not finish this executor");
    const auto needed = executor->call->plan.workspace_size;
    if (workspace_size < needed) {
        return failed(kParamInvalid, api.phase_two,
                      "the workspace has " + std::to_string(workspace_size) + " bytes, phase one asked for " +
                          std::to_string(needed));
    }
    const Consumed consumed(executor);
    if (const auto failure = injected_failure(api.phase_two)) {
        return failed(failure->first, api.phase_two, failure->second);
    }
    return launch(executor->call, executor->storages, workspace, workspace_size, stream);
}

}  // namespace

PhaseOne::PhaseOne(const Api& api, std::uint64_t* workspace_size, aclOpExecutor** executor)
    : api_(api), workspace_size_(workspace_size), executor_(executor), key_(scratch_key), tensors_(scratch_tensors) {
    key_.clear();
    tensors_.clear();
    add(reinterpret_cast<std::uintptr_t>(api.phase_two));
    add(static_cast<int>(soc()));
    add(deterministic_level());
}

void PhaseOne::append(const void* bytes, std::size_t size) { key_.append(static_cast<const char*>(bytes), size); }

aclnnStatus PhaseOne::run(const void* object, Plan (*build)(const void* object)) {
    if (const auto done = begin()) return *done;
    return guarded([&] { return finish(build(object)); });
}

// The key has no addresses, only the index of the first argument that is the same object.
void PhaseOne::add(const aclTensor* tensor) {
    note_if_destroyed(tensor);
    const auto first = std::find(tensors_.begin(), tensors_.end(), tensor) - tensors_.begin();
    tensors_.push_back(tensor);
    add(static_cast<std::uint8_t>(tensor == nullptr ? 0xFF : first));
    if (tensor == nullptr) return;
    const auto& layout = tensor->layout;
    for (const Dims* dims : {&layout.shape, &layout.strides, &layout.storage_shape}) {
        add(static_cast<std::uint8_t>(dims->rank()));
        append(dims->begin(), dims->rank() * sizeof(std::int64_t));
    }
    add(layout.offset);
    add(static_cast<int>(layout.dtype));
    add(static_cast<int>(layout.format));
}

// Values of variable length are preceded by their length, -1 if absent, so that no two calls have the same key.
void PhaseOne::add(const aclTensorList* list) {
    note_if_destroyed(list);
    add(list == nullptr ? std::int64_t{-1} : static_cast<std::int64_t>(list->members.size()));
    if (list == nullptr) return;
    for (const aclTensor* member : list->members) add(member);
}

void PhaseOne::add(const aclIntArray* array) {
    note_if_destroyed(array);
    add(array == nullptr ? std::int64_t{-1} : static_cast<std::int64_t>(array->values.size()));
    if (array != nullptr) append(array->values.data(), array->values.size() * sizeof(std::int64_t));
}

void PhaseOne::add(const aclBoolArray* array) {
    note_if_destroyed(array);
    add(array == nullptr ? std::int64_t{-1} : static_cast<std::int64_t>(array->values.size()));
    if (array != nullptr) append(array->values.data(), array->values.size());
}

void PhaseOne::add(const aclScalar* scalar) {
    note_if_destroyed(scalar);
    add(static_cast<int>(scalar == nullptr ? ACL_DT_UNDEFINED : scalar->dtype));
    if (scalar != nullptr) append(scalar->value.data(), item_size(scalar->dtype));
}

void PhaseOne::add(const char* text) {
    const auto size = text == nullptr ? std::int64_t{-1} : static_cast<std::int64_t>(std::strlen(text));
    add(size);
    if (text != nullptr) append(text, static_cast<std::size_t>(size));
}

std::optional<aclnnStatus> PhaseOne::begin() {
    if (const auto failure = injected_failure(api_.phase_one)) return refuse(failure->first, failure->second);
    if (has_destroyed_) return refuse(kInnerError, "an argument was destroyed before");
    if (workspace_size_ == nullptr) return refuse(kNullPointer, "workspaceSize is a null pointer");
    if (executor_ == nullptr) return refuse(kNullPointer, "executor is a null pointer");
    auto call = PhaseCache::of_this_thread().find(key_);
    if (!call) return std::nullopt;
    auto* const wrapper = take_executor(kCacheWrapperMagic);
    wrapper->storages = storages();
    *workspace_size_ = call->plan.workspace_size;
    wrapper->call = std::move(call);
    *executor_ = wrapper;
    return kSuccess;
}

aclnnStatus PhaseOne::finish(Plan plan) {
    auto call = compiled(std::move(plan));
    auto* const executor = take_executor(kComposedMagic);
    executor->cache_entry = PhaseCache::of_this_thread().add(key_, call);
    for (const auto* tensor : tensors_) executor->tensors.push_back({tensor, tensor ? tensor->generation : 0});
    executor->cache_key = key_;
    *workspace_size_ = call->plan.workspace_size;
    executor->call = std::move(call);
    *executor_ = executor;
    return kSuccess;
}

std::optional<aclnnStatus> PhaseOne::begin_individual(std::initializer_list<const char*> names) {
    if (const auto failure = injected_failure(api_.phase_one)) return refuse(failure->first, failure->second);
    if (has_destroyed_) return refuse(kInnerError, "an argument was destroyed before");
    for (std::size_t index = 0; index < names.size(); ++index) {
        if (tensors_[index] == nullptr) return refuse(kNullPointer, std::string(names.begin()[index]) + " is null");
    }
    if (executor_ == nullptr) return refuse(kNullPointer, "executor is a null pointer");
    individual_ = take_executor(kIndividualMagic);
    *executor_ = individual_;
    // The generated code mistakes the null-pointer error for a cache hit.
    if (workspace_size_ == nullptr) return kSuccess;
    auto call = all_contiguous() ? PhaseCache::of_this_thread().find(key_) : nullptr;
    if (!call) return std::nullopt;
    *workspace_size_ = call->plan.workspace_size;
    individual_->storages = storages();
    individual_->call = std::move(call);
    return kSuccess;
}

aclnnStatus PhaseOne::finish_individual(Plan plan) {
    auto call = compiled(std::move(plan));
    // Entries of individual operators are usable immediately.
    if (all_contiguous()) {
        if (const auto entry = PhaseCache::of_this_thread().add(key_, call)) entry->usable = true;
    }
    *workspace_size_ = call->plan.workspace_size;
    individual_->storages = storages();
    individual_->call = std::move(call);
    return kSuccess;
}

aclnnStatus PhaseOne::refuse(aclnnStatus status, const std::string& text) {
    if (individual_ != nullptr) release(individual_);
    last_refusal().set(api_, text.empty() ? "status " + std::to_string(status) : text);
    if (!text.empty()) return failed(status, api_.phase_two, text);
    note_failure(std::string(api_.phase_one) + " returned " + std::to_string(status));
    return status;
}

std::shared_ptr<const Call> PhaseOne::compiled(Plan plan) const {
    std::vector<std::optional<Layout>> layouts;
    layouts.reserve(tensors_.size());
    for (const auto* tensor : tensors_) layouts.push_back(tensor ? std::optional(tensor->layout) : std::nullopt);
    return std::make_shared<const Call>(Call{api_.phase_two, std::move(layouts), std::move(plan)});
}

std::vector<void*> PhaseOne::storages() const {
    std::vector<void*> storages(tensors_.size());
    std::transform(tensors_.begin(), tensors_.end(), storages.begin(),
                   [](const aclTensor* tensor) { return tensor ? tensor->storage : nullptr; });
    return storages;
}

bool PhaseOne::all_contiguous() const {
    return std::all_of(tensors_.begin(), tensors_.end(),
                       [](const aclTensor* tensor) { return tensor->layout.contiguous(); });
}

aclnnStatus phase_two(const Api& api, void* workspace, std::uint64_t workspace_size, aclOpExecutor* executor,
                      aclrtStream stream) {
    if (executor == nullptr) {
        return failed(kNullPointer, api.phase_two, "executor is a null pointer" + last_refusal().of(api));
    }
    if (executor->magic == kIndividualMagic) return run_individual(api, workspace, workspace_size, executor, stream);
    if (executor->magic != kComposedMagic && executor->magic != kCacheWrapperMagic) {
        return failed(kInnerError, api.phase_two, "this is not an executor, or no longer one");
    }
    const Consumed consumed(executor);
    if (workspace_size > 0 && workspace == nullptr) return failed(kNullPointer, api.phase_two, "workspace is null");
    if (const auto failure = injected_failure(api.phase_two)) {
        return failed(failure->first, api.phase_two, failure->second);
    }
    if (executor->magic == kCacheWrapperMagic) {
        return launch(executor->call, executor->storages, workspace, workspace_size, stream);
    }
    std::vector<void*> storages;
    storages.reserve(executor->tensors.size());
    for (const auto& use : executor->tensors) {
        if (use.destroyed()) return failed(kInnerError, api.phase_two, "a tensor was destroyed after phase one");
        storages.push_back(use.tensor == nullptr ? nullptr : use.tensor->storage);
    }
    const auto status = launch(executor->call, storages, workspace, workspace_size, stream);
    // A call without a kernel cannot be repeated.
    const bool launched = status == kSuccess && executor->call->plan.kernel;
    if (launched && executor->cache_entry) executor->cache_entry->usable = true;
    return status;
}

}  // namespace host_npu
