#include "hccl/task.h"

#include <string>
#include <utility>

#include "ascendcl/error.h"

namespace host_npu::hccl {
namespace {

class Task {
  public:
    Task(std::shared_ptr<Communicator> communicator, const CallHead& head, std::function<void()> body)
        : communicator_(std::move(communicator)), head_(head), body_(std::move(body)) {}
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

    ~Task() {
        if (!has_run_) fail("its stream had failed before, or was destroyed", ACL_ERROR_RT_STREAM_NOT_COMPLETE);
    }

    // Suppresses the failure on destruction, for a task that could not be enqueued: the caller gets the status.
    void dismiss() { has_run_ = true; }

    void run() {
        has_run_ = true;
        try {
            communicator_->throw_if_failed();
            communicator_->set_activity(head_);
            body_();
        } catch (const Error& error) {
            fail(error.what(), error.status());
            throw;
        } catch (const std::exception& error) {
            fail(error.what(), ACL_ERROR_RT_AICORE_EXCEPTION);
            throw;
        }
    }

  private:
    void fail(const std::string& reason, std::int32_t status) noexcept {
        const auto rank = "rank " + std::to_string(communicator_->rank());
        communicator_->record_failure(status, HCCL_E_REMOTE,
                                      rank + " failed " + where(*communicator_, head_) + ": " + reason);
    }

    const std::shared_ptr<Communicator> communicator_;
    const CallHead head_;
    const std::function<void()> body_;
    bool has_run_ = false;
};

}  // namespace

std::string where(const Communicator& communicator, const CallHead& head) {
    return "in call " + std::to_string(head.number) + ", " + describe(head) + ", of communicator " +
           communicator.name();
}

std::int32_t enqueue_task(std::shared_ptr<Communicator> communicator, const CallHead& head, void* stream,
                          std::function<void()> body) {
    const auto task = std::make_shared<Task>(std::move(communicator), head, std::move(body));
    const auto status = host_npu::enqueue(stream, name_of(head.function), [task] { task->run(); });
    if (status != ACL_SUCCESS) task->dismiss();
    return status;
}

}  // namespace host_npu::hccl
