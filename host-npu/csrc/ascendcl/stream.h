// Streams: task queues with a thread each; and events, which order their tasks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ascendcl/capture.h"
#include "ascendcl/error.h"
#include "ascendcl/handles.h"
#include "ascendcl/task.h"

namespace host_npu {

using Clock = std::chrono::steady_clock;
// Nullopt: no time-out.
using Timeout = std::optional<std::chrono::milliseconds>;

// ACL's time-outs are in milliseconds; -1 is none.
Timeout timeout_from(std::int32_t milliseconds);

// Waits on a condition variable until the predicate holds; returns false on time-out.
template <typename Predicate>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Timeout timeout,
                Predicate predicate) {
    if (timeout) return changed.wait_for(lock, *timeout, predicate);
    changed.wait(lock, predicate);
    return true;
}

class Stream {
  public:
    Stream(std::int32_t device, std::int32_t id, std::uint32_t priority, std::uint32_t flags);
    // Waits for queued tasks.
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    std::int32_t device() const { return device_; }
    std::int32_t id() const { return id_; }
    std::uint32_t priority() const { return priority_; }
    std::uint32_t flags() const { return flags_; }

    // Enqueues a task, or records it if the stream is being captured.
    void enqueue(Task task);
    // Enqueues a task that an earlier fault may cancel.
    void enqueue(std::string name, std::function<void()> work);
    // Enqueues a task that always runs, because other threads wait for it.
    void enqueue_signal(std::string name, std::function<void()> work);
    // Enqueues the tasks of a graph.
    void replay(std::shared_ptr<Graph> graph);

    // Until end_update(), enqueued tasks replace those of a group. The stream puts them into the graph, which may be
    // running. end_update() throws unless they launch the same operators.
    void begin_update(std::shared_ptr<const TaskGroup> group);
    void end_update();

    // The capture that the stream takes part in, or null.
    std::shared_ptr<Capture> capture() const;
    void set_capture(std::shared_ptr<Capture> capture);

    bool is_idle() const;
    // Waits for the tasks enqueued before the call, then throws their fault, if any.
    void synchronize(Timeout timeout);
    // The same, but leaves the fault to the next synchronization.
    void finish();
    // The unreported fault of earlier tasks, if any.
    std::optional<Error> fault() const;
    // Stores a fault for the next synchronization, unless one is stored already.
    void keep_fault(const Error& fault);
    // Drops tasks that have not started.
    void abandon();

    void set_stop_on_failure(bool stop);

  private:
    struct Update {
        std::shared_ptr<const TaskGroup> group;
        std::vector<Task> tasks;
    };

    // Returns whether the stream will run the task; false if an update takes it.
    bool push(Task task);
    void serve();
    // Whether a fault cancels tasks. stops() requires the lock.
    bool stops() const { return fault_ && stops_on_failure_; }
    bool stops_now() const;
    void run(const Task& task);
    void keep_fault(const Task& task, std::int32_t status, const std::string& text);

    const std::int32_t device_;
    const std::int32_t id_;
    const std::uint32_t priority_;
    const std::uint32_t flags_;

    mutable std::mutex mutex_;
    std::condition_variable queued_;
    std::condition_variable finished_;
    std::deque<Task> tasks_;
    std::uint64_t pushed_ = 0;
    std::uint64_t done_ = 0;
    bool closing_ = false;
    bool stops_on_failure_ = false;
    std::optional<Error> fault_;
    std::shared_ptr<Capture> capture_;
    std::optional<Update> update_;
    // Started by the first task, because most streams of a pool are never used.
    std::thread worker_;
};

class Event {
  public:
    explicit Event(std::uint32_t flags) : flags_(flags) {}

    std::uint32_t flags() const { return flags_; }
    void record(Stream& stream);
    void reset(Stream& stream);
    // Makes later tasks of `stream` wait for the last record, and passes on the recording stream's fault there.
    void block(Stream& stream);
    bool is_complete() const;
    // Waits for the last record, then throws the recording stream's fault at that point, if any.
    void synchronize(Timeout timeout);
    // The time at which the stream reached the last record; nullopt if it has not.
    std::optional<Clock::time_point> time() const;

  private:
    class Record;
    // A record made during a capture.
    struct CapturedRecord {
        std::weak_ptr<Capture> capture;
        Capture::Position position;
    };

    // Null if the event was never recorded.
    std::shared_ptr<Record> last_record() const;
    std::optional<CapturedRecord> captured_record() const;
    // Throws if the last record was made during a capture, where it can be neither awaited nor queried.
    void require_uncaptured(const char* what) const;
    void require_no_external(const Stream& stream) const;

    const std::uint32_t flags_;
    mutable std::mutex mutex_;
    std::shared_ptr<Record> last_;
    std::optional<CapturedRecord> captured_;
};

Handles<Stream>& streams();
Handles<Event>& events();

}  // namespace host_npu
