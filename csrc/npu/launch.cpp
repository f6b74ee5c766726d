#include "launch.h"

#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <atomic>
#include <iostream>

#include "determinism.h"

// Exported from op-plugin 26.0: they apply a program's limits on the cores of a stream.
aclrtStream GetAclStream() __attribute__((weak));
void InitExecSubTheadCtx(aclrtStream stream) __attribute__((weak));

namespace torch_aclnn_ops {

namespace {

// A task that has run, or will never run, has no other owner.
template <class Task>
void check_queue_has_taken(const std::shared_ptr<Task>& task, const std::string& name) {
    const bool is_nobodys = task.use_count() == 1;
    std::atomic_thread_fence(std::memory_order_acquire);
    TORCH_CHECK(!is_nobodys || task->has_run(), name,
                ": torch_npu's task queue has ended, because an earlier operator failed, and silently drops all later"
                " work. Restart the process; with TASK_QUEUE_ENABLE=0 there is no queue.");
}

class EmptyTask {
  public:
    aclnn::Status run() noexcept {
        has_run_.store(true, std::memory_order_release);
        return aclnn::kSuccess;
    }
    bool has_run() const { return has_run_.load(std::memory_order_acquire); }

  private:
    std::atomic<bool> has_run_ = false;
};

}  // namespace

void check_queue(const std::string& name) {
    const auto task = std::make_shared<EmptyTask>();
    at_npu::native::OpCommand::RunOpApiV2(name, [task] { return task->run(); });
    check_queue_has_taken(task, name);
}

aclnn::Status PhaseTwoCall::run() noexcept {
    if (InitExecSubTheadCtx != nullptr) {
        InitExecSubTheadCtx(stream_);
    }
    const aclnn::Status status = function_(workspace_, workspace_size_, std::exchange(executor_, nullptr), stream_);
    if (status != aclnn::kSuccess) {
        message_ = take_cann_message();
        if (std::this_thread::get_id() == caller_) {
            status_ = status;
        } else {
            // torch_npu raises a failure on the queue's thread once, without this message.
            std::cerr << describe_status(operator_name_.c_str(), Phase::kTwo, status, message_) << std::endl;
        }
    }
    release();
    has_run_.store(true, std::memory_order_release);
    return status;
}

void PhaseTwoCall::release() noexcept {
    tensors_.clear();
    scalars_.clear();
    if (executor_ != nullptr) {
        base_api().destroy_executor(std::exchange(executor_, nullptr));
    }
}

Launch::Launch(const std::string& operator_name, aclnn::PhaseTwo* phase_two, c10::Device device)
    : operator_name_(operator_name), call_(std::make_shared<PhaseTwoCall>(operator_name, phase_two)), device_(device) {
    apply_determinism();
    // A failed operator of torch_npu may have left its key for the executor cache on this thread.
    if (const auto forget_pta_cache = base_api().forget_pta_cache; forget_pta_cache != nullptr) {
        forget_pta_cache();
    }
}

aclTensor* Launch::keep(const char* parameter, const at::Tensor& tensor) {
    if (!tensor.defined()) {
        return nullptr;
    }
    check_device(tensor, device_, operator_name_.c_str(), parameter);
    const at::Tensor& given = has_private_format(tensor) ? copies_.emplace_back(to_base_format(tensor)) : tensor;
    return call_->tensors_.emplace_back(make_acl_tensor(given)).get();
}

aclTensor* Launch::keep_in_place(const char* parameter, const at::Tensor& tensor) {
    check_device(tensor, device_, operator_name_.c_str(), parameter);
    TORCH_CHECK(!has_private_format(tensor), operator_name_, ": ", parameter,
                " is written in place, so it must not be in a private format such as FRACTAL_NZ; cast it with"
                " torch_npu.npu_format_cast_(tensor, 2)");
    return call_->tensors_.emplace_back(make_acl_tensor(tensor)).get();
}

Workspace::Workspace(uint64_t size) {
    if (size > 0) {
        data_ = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(size);
    }
}

const PhaseTwoCall& Launch::enqueue(const Workspace& workspace) {
    // stream() without an argument, or with true, would wait for the queue.
    call_->stream_ = GetAclStream == nullptr ? c10_npu::getCurrentNPUStream().stream(false) : GetAclStream();
    call_->workspace_ = call_->workspace_size_ > 0 ? workspace.get() : nullptr;
    try {
        at_npu::native::OpCommand::RunOpApiV2(operator_name_, [call = call_] { return call->run(); });
    } catch (const std::exception&) {
        if (call_->status() == aclnn::kSuccess) {
            throw;  // an earlier failure of the queue, not of this call
        }
    }
    check_queue_has_taken(call_, operator_name_);
    return *call_;
}

}  // namespace torch_aclnn_ops
