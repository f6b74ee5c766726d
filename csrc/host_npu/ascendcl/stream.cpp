#include "ascendcl/stream.h"

#include <algorithm>
#include <utility>

#include "acl/acl_rt.h"
#include "ascendcl/queue.h"

namespace host_npu {

Timeout timeout_from(std::int32_t milliseconds) {
    require(milliseconds >= -1, "timeout must be -1 or at least 0");
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
    // The last owner of a stream may be a task of its own.
    if (worker_.get_id() == std::this_thread::get_id()) {
        worker_.detach();
    } else {
        worker_.join();
    }
}

void Stream::enqueue(std::string name, std::function<void()> work) { push({std::move(name), std::move(work), false}); }

void Stream::enqueue_signal(std::string name, std::function<void()> work) {
    push({std::move(name), std::move(work), true});
}

void Stream::push(Task task) {
    queue_goes_on();
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        ++pushed_;
        if (!worker_.joinable()) worker_ = std::thread([this] { serve(); });
    }
    queued_.notify_one();
}

void Stream::serve() {
    std::unique_lock lock(mutex_);
    while (true) {
        queued_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        {
            const Task task = std::move(tasks_.front());
            tasks_.pop_front();
            const bool cancelled = fault_ && stops_on_failure_ && !task.is_signal;
            lock.unlock();
            if (!cancelled) run(task);
            // The task ends here, with all it owns: who waits for it may count what is alive.
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
    const std::lock_guard lock(mutex_);
    if (fault_) return;
    fault_.emplace(status, task.name + " failed on stream " + std::to_string(id_) + " of device " +
                               std::to_string(device_) + ": " + text);
}

bool Stream::is_idle() const {
    const std::lock_guard lock(mutex_);
    return done_ == pushed_;
}

void Stream::synchronize(Timeout timeout) {
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

void Event::record(Stream& stream) {
    std::uint64_t record = 0;
    {
        const std::lock_guard lock(mutex_);
        record = ++recorded_;
        pending_.insert(record);
    }
    stream.enqueue_signal("record of an event", [self = shared_from_this(), record] { self->complete(record); });
}

void Event::reset(Stream& stream) {
    stream.enqueue_signal("reset of an event", [self = shared_from_this(), record = last_record()] {
        const std::lock_guard lock(self->mutex_);
        self->reset_ = std::max(self->reset_, record);
    });
}

void Event::block(Stream& stream) {
    const auto record = last_record();
    stream.enqueue_signal("wait for an event", [self = shared_from_this(), record] { self->wait_for(record); });
}

std::uint64_t Event::last_record() const {
    const std::lock_guard lock(mutex_);
    return recorded_;
}

void Event::complete(std::uint64_t record) {
    {
        const std::lock_guard lock(mutex_);
        pending_.erase(record);
        if (record == recorded_) completed_at_ = Clock::now();
    }
    completed_changed_.notify_all();
}

void Event::wait_for(std::uint64_t record) {
    std::unique_lock lock(mutex_);
    completed_changed_.wait(lock, [&] { return !pending_.contains(record); });
}

bool Event::is_complete() const {
    const std::lock_guard lock(mutex_);
    return !pending_.contains(recorded_);
}

void Event::synchronize(Timeout timeout) {
    std::unique_lock lock(mutex_);
    const auto record = recorded_;
    if (!wait_until(completed_changed_, lock, timeout, [&] { return !pending_.contains(record); })) {
        throw Error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the event was not reached in time");
    }
}

std::optional<Clock::time_point> Event::time() const {
    const std::lock_guard lock(mutex_);
    if (recorded_ <= reset_ || pending_.contains(recorded_)) return std::nullopt;
    return completed_at_;
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
