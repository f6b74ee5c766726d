#include "ascendcl/stream.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "acl/acl_rt.h"
#include "ascendcl/acl_names.h"
#include "ascendcl/queue.h"

namespace host_npu {

Timeout timeout_from(std::int32_t milliseconds) {
    require(milliseconds >= -1, "timeout must be -1 or at least 0, got " + std::to_string(milliseconds));
    if (milliseconds == -1) return std::nullopt;
    return std::chrono::milliseconds(milliseconds);
}

Stream::Stream(std::int32_t device, std::int32_t id, std::uint32_t priority, std::uint32_t flags)
    : device_(device), id_(id), priority_(priority), flags_(flags) {}

Stream::~Stream() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    queued_.notify_one();
    if (!worker_.joinable()) return;
    // A task may be the last owner of its own stream.
    if (worker_.get_id() == std::this_thread::get_id()) {
        worker_.detach();
    } else {
        worker_.join();
    }
}

void Stream::enqueue(std::string name, std::function<void()> work) {
    enqueue({.name = std::move(name), .work = std::move(work)});
}

void Stream::enqueue_signal(std::string name, std::function<void()> work) {
    enqueue({.name = std::move(name), .work = std::move(work), .is_signal = true, .captured = Captured::recorded});
}

void Stream::enqueue(Task task) {
    queue_goes_on();
    if (const auto capture = this->capture()) return capture->record(*this, std::move(task));
    const auto* const launch = task.launch;
    if (push(std::move(task)) && launch != nullptr) count_launch(launch);
}

void Stream::replay(std::shared_ptr<Graph> graph) {
    const auto run_all = [this, graph = std::move(graph)] {
        const std::lock_guard lock(graph->running());
        for (std::size_t place = 0; place < graph->size(); ++place) {
            const auto task = graph->task(place);
            if (task->is_signal || !stops_now()) run(*task);
        }
    };
    push({.name = "replay of a graph", .work = run_all, .is_signal = true});
}

void Stream::begin_update(std::shared_ptr<const TaskGroup> group) {
    require_uncaptured(*this, "an update of a task group");
    const std::lock_guard lock(mutex_);
    if (update_) throw Error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update has begun on the stream already");
    update_ = Update{.group = std::move(group), .tasks = {}};
}

void Stream::end_update() {
    auto update = [this] {
        const std::lock_guard lock(mutex_);
        return std::exchange(update_, std::nullopt);
    }();
    if (!update) throw Error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update has begun on the stream");
    const auto graph = update->group->graph.lock();
    if (!graph) throw Error(ACL_ERROR_RT_INVALID_HANDLE, "the graph of the task group is gone");
    std::string wanted, given;
    for (const auto place : update->group->places) wanted += " " + graph->task(place)->name;
    for (const auto& task : update->tasks) given += " " + task.name;
    if (given != wanted) {
        throw Error(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    "the task group has the operators [" + wanted + " ], the update [" + given + " ]");
    }
    enqueue_signal("update of a task group", [graph, update = std::move(*update)]() mutable {
        for (std::size_t index = 0; index < update.tasks.size(); ++index) {
            graph->replace(update.group->places[index], std::move(update.tasks[index]));
        }
    });
}

std::shared_ptr<Capture> Stream::capture() const {
    if (!captures_are_under_way()) return nullptr;
    const std::lock_guard lock(mutex_);
    return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
    const std::lock_guard lock(mutex_);
    capture_ = std::move(capture);
}

bool Stream::push(Task task) {
    {
        const std::lock_guard lock(mutex_);
        if (update_) {
            update_->tasks.push_back(std::move(task));
            return false;
        }
        tasks_.push_back(std::move(task));
        ++pushed_;
        if (!worker_.joinable()) worker_ = std::thread([this] { serve(); });
    }
    queued_.notify_one();
    return true;
}

void Stream::serve() {
    // A thread inherits the name of its creator, which may be that of torch_npu's queue.
    pthread_setname_np(pthread_self(), "host_npu_stream");
    std::unique_lock lock(mutex_);
    while (true) {
        queued_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        {
            const Task task = std::move(tasks_.front());
            tasks_.pop_front();
            const bool cancelled = stops() && !task.is_signal;
            lock.unlock();
            if (!cancelled) run(task);
            // The task is destroyed before its end is signaled: waiting tests may count live objects.
        }
        lock.lock();
        ++done_;
        finished_.notify_all();
    }
}

void Stream::run(const Task& task) {
    try {
        task.work();
    } catch (const Error& error) {
        keep_fault(task, error.status(), error.what());
    } catch (const std::exception& error) {
        keep_fault(task, ACL_ERROR_RT_AICORE_EXCEPTION, error.what());
    }
}

void Stream::keep_fault(const Task& task, std::int32_t status, const std::string& text) {
    keep_fault(Error(status, task.name + " failed on stream " + std::to_string(id_) + " of device " +
                                 std::to_string(device_) + ": " + text));
}

void Stream::keep_fault(const Error& fault) {
    const std::lock_guard lock(mutex_);
    if (!fault_) fault_ = fault;
}

std::optional<Error> Stream::fault() const {
    const std::lock_guard lock(mutex_);
    return fault_;
}

bool Stream::stops_now() const {
    const std::lock_guard lock(mutex_);
    return stops();
}

bool Stream::is_idle() const {
    const std::lock_guard lock(mutex_);
    return done_ == pushed_;
}

void Stream::finish() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this, last = pushed_] { return done_ >= last; });
}

void Stream::synchronize(Timeout timeout) {
    require_uncaptured(*this, "to wait for a stream");
    std::unique_lock lock(mutex_);
    const auto last = pushed_;
    if (!wait_until(finished_, lock, timeout, [&] { return done_ >= last; })) {
        throw Error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the stream has not finished in time");
    }
    if (fault_) throw *std::exchange(fault_, std::nullopt);
}

void Stream::abandon() {
    const std::lock_guard lock(mutex_);
    std::deque<Task> signals;
    for (auto& task : tasks_) {
        if (task.is_signal) {
            signals.push_back(std::move(task));
        } else {
            ++done_;
        }
    }
    tasks_ = std::move(signals);
    finished_.notify_all();
}

void Stream::set_stop_on_failure(bool stop) {
    const std::lock_guard lock(mutex_);
    stops_on_failure_ = stop;
}

// A recorded position in a stream.
class Event::Record {
  public:
    void reach(std::optional<Error> fault) {
        {
            const std::lock_guard lock(mutex_);
            is_reached_ = true;
            reached_at_ = Clock::now();
            fault_ = std::move(fault);
        }
        reached_.notify_all();
    }

    void reset() {
        const std::lock_guard lock(mutex_);
        is_reset_ = true;
    }

    bool is_reached() const {
        const std::lock_guard lock(mutex_);
        return is_reached_;
    }

    // Returns the fault of the recording stream, if any.
    std::optional<Error> wait(Timeout timeout) {
        std::unique_lock lock(mutex_);
        if (!wait_until(reached_, lock, timeout, [this] { return is_reached_; })) {
            throw Error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the event was not reached in time");
        }
        return fault_;
    }

    std::optional<Clock::time_point> time() const {
        const std::lock_guard lock(mutex_);
        if (!is_reached_ || is_reset_) return std::nullopt;
        return reached_at_;
    }

  private:
    mutable std::mutex mutex_;
    std::condition_variable reached_;
    bool is_reached_ = false;
    bool is_reset_ = false;
    Clock::time_point reached_at_;
    std::optional<Error> fault_;
};

void Event::record(Stream& stream) {
    require_no_external(stream);
    if (const auto capture = stream.capture()) {
        const std::lock_guard lock(mutex_);
        captured_ = {capture, capture->position(stream)};
        return;
    }
    const auto record = std::make_shared<Record>();
    {
        const std::lock_guard lock(mutex_);
        last_ = record;
        captured_.reset();
    }
    stream.enqueue_signal("record of an event", [record, &stream] { record->reach(stream.fault()); });
}

void Event::reset(Stream& stream) {
    require_no_external(stream);
    const auto record = last_record();
    if (!record) return;
    stream.enqueue_signal("reset of an event", [record] { record->reset(); });
}

void Event::block(Stream& stream) {
    require_no_external(stream);
    if (const auto captured = captured_record()) {
        const auto capture = captured->capture.lock();
        if (!capture || capture->is_over()) require_uncaptured("to wait for an event");
        return capture->join(stream, captured->position);
    }
    const auto record = last_record();
    if (!record) return;
    if (const auto capture = stream.capture()) {
        capture->refuse(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                        "a captured stream waits for an event that was recorded outside of the capture");
    }
    stream.enqueue_signal("wait for an event", [record, &stream] {
        if (const auto fault = record->wait(std::nullopt)) stream.keep_fault(*fault);
    });
}

std::optional<Event::CapturedRecord> Event::captured_record() const {
    const std::lock_guard lock(mutex_);
    return captured_;
}

void Event::require_uncaptured(const char* what) const {
    const auto captured = captured_record();
    if (!captured) return;
    const auto text = std::string(what) + " is not possible, because a captured stream has recorded it";
    const auto capture = captured->capture.lock();
    if (capture && !capture->is_over()) capture->refuse(ACL_ERROR_RT_EVENT_CAPTURED, text);
    throw RefusedInCapture(ACL_ERROR_RT_EVENT_CAPTURED, text, false);
}

void Event::require_no_external(const Stream& stream) const {
    if ((flags_ & ACL_EVENT_EXTERNAL) == 0) return;
    if (const auto capture = stream.capture()) {
        capture->refuse(ACL_ERROR_RT_EVENT_CAPTURED,
                        "the host NPU does not simulate external events (ACL_EVENT_EXTERNAL) in captured graphs");
    }
}

std::shared_ptr<Event::Record> Event::last_record() const {
    const std::lock_guard lock(mutex_);
    return last_;
}

bool Event::is_complete() const {
    require_uncaptured("to query an event");
    const auto record = last_record();
    return !record || record->is_reached();
}

void Event::synchronize(Timeout timeout) {
    require_uncaptured("to wait for an event");
    const auto record = last_record();
    if (!record) return;
    if (const auto fault = record->wait(timeout)) throw *fault;
}

std::optional<Clock::time_point> Event::time() const {
    require_uncaptured("to read the time of an event");
    const auto record = last_record();
    return record ? record->time() : std::nullopt;
}

Handles<Stream>& streams() {
    static auto& all = *new Handles<Stream>("aclrtStream");
    return all;
}

Handles<Event>& events() {
    static auto& all = *new Handles<Event>("aclrtEvent");
    return all;
}

}  // namespace host_npu
