// A queue of work with a thread of its own, and the events that order queues.
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

#include "ascendcl/error.h"
#include "ascendcl/handles.h"

namespace host_npu {

using Clock = std::chrono::steady_clock;
// Nothing means that there is none.
using Timeout = std::optional<std::chrono::milliseconds>;

// ACL counts a time-out in milliseconds and writes -1 for none.
Timeout timeout_from(std::int32_t milliseconds);

// Waits on a condition variable until the predicate holds; returns false if the time is over before.
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
    // Waits for the work that is queued.
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    std::int32_t device() const { return device_; }
    std::int32_t id() const { return id_; }
    std::uint32_t priority() const { return priority_; }
    std::uint32_t flags() const { return flags_; }

    // Queues work that an earlier fault may cancel.
    void enqueue(std::string name, std::function<void()> work);
    // Queues work that other threads wait for, and that therefore always runs.
    void enqueue_signal(std::string name, std::function<void()> work);

    bool is_idle() const;
    // Waits for the work queued before the call, then throws the fault that it left behind, if any.
    void synchronize(Timeout timeout);
    // The fault that the work up to now has left behind, if no synchronization has reported it yet.
    std::optional<Error> fault() const;
    // Keeps a fault for the next synchronization, unless there is one already.
    void keep_fault(const Error& fault);
    // Drops what has not begun.
    void abandon();

    void set_stop_on_failure(bool stop);

  private:
    struct Task {
        std::string name;
        std::function<void()> work;
        bool is_signal;
    };

    void push(Task task);
    void serve();
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
    // Begins with the first task: most of the streams of a pool never get one.
    std::thread worker_;
};

class Event {
  public:
    explicit Event(std::uint32_t flags) : flags_(flags) {}

    std::uint32_t flags() const { return flags_; }
    void record(Stream& stream);
    void reset(Stream& stream);
    // Lets the work queued on `stream` from now on wait for the last record, and takes over the fault that the
    // recording stream had left behind there.
    void block(Stream& stream);
    bool is_complete() const;
    // Waits for the last record, then throws the fault that the recording stream had left behind there, if any.
    void synchronize(Timeout timeout);
    // When the stream reached the last record; nothing if it has not.
    std::optional<Clock::time_point> time() const;

  private:
    class Record;

    // Null if it was never recorded.
    std::shared_ptr<Record> last_record() const;

    const std::uint32_t flags_;
    mutable std::mutex mutex_;
    std::shared_ptr<Record> last_;
};

Handles<Stream>& streams();
Handles<Event>& events();

}  // namespace host_npu
