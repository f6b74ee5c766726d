// The two-phase call of an aclnn operator, the same for all operators.
//
// Phase one runs on the calling thread, so that its errors are raised by the call. Only phase two is queued.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "status.h"
#include "symbols.h"
#include "tensor.h"

namespace torch_aclnn_ops {

// Raises, with the name of a function, if torch_npu's task queue has stopped and silently drops all work. For functions
// that only use torch_npu's operators; a launch checks this itself.
void check_queue(const std::string& name);

// Owns the resources of phase two, and releases them whether it runs or not.
class PhaseTwoCall {
  public:
    // The name must outlive the call.
    PhaseTwoCall(const std::string& operator_name, aclnn::PhaseTwo* function)
        : operator_name_(operator_name), function_(function) {}
    ~PhaseTwoCall() { release(); }
    PhaseTwoCall(const PhaseTwoCall&) = delete;
    PhaseTwoCall& operator=(const PhaseTwoCall&) = delete;

    // Runs phase two, which consumes the executor, and destroys the aclTensors and aclScalars.
    aclnn::Status run() noexcept;

    // Whether run() has returned on any thread.
    bool has_run() const { return has_run_.load(std::memory_order_acquire); }

    // The status and CANN's message from run(), if it ran on the thread of the call.
    aclnn::Status status() const { return status_; }
    const std::string& message() const { return message_; }

  private:
    friend class Launch;
    void release() noexcept;

    const std::string& operator_name_;
    aclnn::PhaseTwo* const function_;
    const std::thread::id caller_ = std::this_thread::get_id();
    aclrtStream stream_ = nullptr;
    void* workspace_ = nullptr;
    uint64_t workspace_size_ = 0;
    aclOpExecutor* executor_ = nullptr;
    c10::SmallVector<AclTensor, 12> tensors_;
    c10::SmallVector<AclScalar, 2> scalars_;
    std::atomic<bool> has_run_ = false;
    aclnn::Status status_ = aclnn::kSuccess;
    std::string message_;
};

// Device memory shared by the phase-two calls of one stream, which run one after another.
//
// It may be freed while phase two is queued: the allocator reuses the memory only for later work of the same stream.
// Freeing it on the queue's thread could deadlock with a thread that waits for the queue while it holds the allocator's
// lock.
class Workspace {
  public:
    explicit Workspace(uint64_t size);
    void* get() const { return data_.get(); }

  private:
    c10::DataPtr data_;
};

// One call of an operator: converts its arguments, then queues its phase two.
class Launch {
  public:
    Launch(const std::string& operator_name, aclnn::PhaseTwo* phase_two, c10::Device device);

    template <class Parameter, class Argument>
    Parameter convert(const char* parameter, const Argument& argument) {
        if constexpr (std::is_same_v<Argument, std::nullptr_t>) {
            return nullptr;
        } else if constexpr (std::is_same_v<Argument, at::Tensor>) {
            return keep(parameter, argument);
        } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
            return argument.has_value() ? keep(parameter, *argument) : nullptr;
        } else if constexpr (std::is_same_v<Argument, InPlace>) {
            return keep_in_place(parameter, argument.tensor);
        } else if constexpr (std::is_same_v<Parameter, Scalar>) {
            return call_->scalars_.emplace_back(make_acl_scalar(argument)).get();
        } else {
            static_assert(std::is_same_v<Parameter, Argument>, "CANN's function has another parameter type here");
            return argument;
        }
    }

    uint64_t* workspace_size() { return &call_->workspace_size_; }
    aclOpExecutor** executor() { return &call_->executor_; }

    // After a failure of phase one, the executor must not be used even if it was set.
    void forget_executor() { call_->executor_ = nullptr; }

    // The workspace size of phase two in bytes, known after phase one.
    uint64_t needed_workspace() const { return call_->workspace_size_; }

    // Queues phase two; returns its status if there is no queue.
    const PhaseTwoCall& enqueue(const Workspace& workspace);

  private:
    aclTensor* keep(const char* parameter, const at::Tensor& tensor);
    aclTensor* keep_in_place(const char* parameter, const at::Tensor& tensor);

    const std::string& operator_name_;
    std::shared_ptr<PhaseTwoCall> call_;
    c10::Device device_;
    // Copies of arguments in a private format. The allocator orders the reuse of their memory by the stream.
    c10::SmallVector<at::Tensor, 1> copies_;
};

template <class Argument>
void describe_to(std::ostream& text, const Argument& argument) {
    if constexpr (std::is_same_v<Argument, std::nullptr_t>) {
        text << "null";
    } else if constexpr (std::is_same_v<Argument, at::Tensor>) {
        text << describe(argument);
    } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
        text << (argument.has_value() ? describe(*argument) : "null");
    } else if constexpr (std::is_same_v<Argument, InPlace>) {
        text << describe(argument.tensor);
    } else {
        text << std::boolalpha << argument;
    }
}

template <class Operator, class... Arguments>
std::string describe_call(const Arguments&... arguments) {
    std::ostringstream text;
    size_t index = 0;
    const auto add = [&](const auto& argument) {
        text << (index == 0 ? "" : ", ") << Operator::parameters[index] << " ";
        describe_to(text, argument);
        ++index;
    };
    (add(arguments), ...);
    return text.str();
}

template <class Operator, size_t... index, class... Arguments>
Launch prepare_indexed(std::index_sequence<index...>, const Arguments&... arguments) {
    using Parameters = typename Operator::Parameters;
    static const std::string name = Operator::cann;  // static, because the queue needs a string in every call
    const Functions<Operator>& functions = functions_of<Operator>();
    Launch launch(name, functions.phase_two, device_of_first(arguments...));
    const aclnn::Status status = functions.phase_one(
        launch.convert<std::tuple_element_t<index, Parameters>>(Operator::parameters[index], arguments)...,
        launch.workspace_size(), launch.executor());
    if (status != aclnn::kSuccess) {
        launch.forget_executor();
        const std::string message = take_cann_message();
        check_queue(name);  // the cause may be the failure of an earlier call
        raise_status(Operator::cann, Phase::kOne, status, message, describe_call<Operator>(arguments...));
    }
    return launch;
}

// Runs phase one with its arguments: tensors, optional tensors, nullptr, InPlace, and numbers of exactly the parameter
// types of the C function, or any numbers for a Scalar.
template <class Operator, class... Arguments>
Launch prepare(const Arguments&... arguments) {
    static_assert(sizeof...(Arguments) == std::tuple_size_v<typename Operator::Parameters>);
    static_assert(sizeof...(Arguments) == Operator::parameters.size());
    return prepare_indexed<Operator>(std::index_sequence_for<Arguments...>{}, arguments...);
}

// Queues phase two of a call; the arguments are those of phase one, for the message of an error.
template <class Operator, class... Arguments>
void enqueue(Launch& launch, const Workspace& workspace, const Arguments&... arguments) {
    const PhaseTwoCall& call = launch.enqueue(workspace);
    if (call.status() != aclnn::kSuccess) {
        raise_status(Operator::cann, Phase::kTwo, call.status(), call.message(), describe_call<Operator>(arguments...));
    }
    launches_of<Operator>.fetch_add(1, std::memory_order_relaxed);
}

// Calls the operator: both phases.
template <class Operator, class... Arguments>
void launch(const Arguments&... arguments) {
    Launch prepared = prepare<Operator>(arguments...);
    enqueue<Operator>(prepared, Workspace(prepared.needed_workspace()), arguments...);
}

}  // namespace torch_aclnn_ops
