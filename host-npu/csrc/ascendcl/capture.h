// Captures: what is enqueued on their streams is recorded, to be replayed as a graph.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ascendcl/acl_names.h"
#include "ascendcl/error.h"
#include "ascendcl/handles.h"
#include "ascendcl/shadow.h"
#include "ascendcl/task.h"

namespace host_npu {

class Stream;
class Graph;

// Tasks of a graph that others of the same operators can replace.
struct TaskGroup {
    std::weak_ptr<Graph> graph;
    // Their places in the graph.
    std::vector<std::size_t> places;
};

Handles<TaskGroup>& task_groups();

// Captured tasks, in an order in which they can run one after the other.
class Graph {
  public:
    explicit Graph(std::int32_t device);
    // Its task groups end with it.
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    std::int32_t device() const { return device_; }
    std::uint32_t id() const { return id_; }
    bool is_complete() const { return is_complete_; }
    std::size_t size() const;
    // What is in this place now.
    std::shared_ptr<const Task> task(std::size_t place) const;

    // Returns its place.
    std::size_t add(Task task);
    void replace(std::size_t place, Task task);
    void* add_group(std::shared_ptr<TaskGroup> group);
    void complete() { is_complete_ = true; }

    // Held by a replay: a graph's replays are one after the other.
    std::mutex& running() { return running_; }

  private:
    const std::int32_t device_;
    const std::uint32_t id_;
    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<const Task>> tasks_;
    std::vector<void*> groups_;
    std::atomic<bool> is_complete_ = false;
    std::mutex running_;
};

// A capture from its beginning to its end: the streams that take part, and what they have recorded. Where it refuses
// something that a device refuses, it becomes invalid, and only its end is left. Thread-safe.
class Capture : public std::enable_shared_from_this<Capture> {
  public:
    // How many tasks of each stream come before something.
    using Position = std::map<const Stream*, std::uint64_t>;

    Capture(std::shared_ptr<Graph> graph, Stream& origin, aclmdlRICaptureMode mode);
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;

    const std::shared_ptr<Graph>& graph() const { return graph_; }
    bool is_valid() const;
    bool is_over() const;
    bool began_in_this_thread() const { return thread_ == std::this_thread::get_id(); }
    aclmdlRICaptureMode mode() const { return mode_; }

    // Records the task, after it has been run in the copy of device memory if that is how it is captured.
    void record(const Stream& stream, Task task);
    // A copy of device memory as the tasks recorded so far have left it.
    ShadowMemory& shadow() { return *shadow_; }

    // What the stream records in between belongs to a task group, whose handle the second returns.
    void begin_group(const Stream& stream);
    void* end_group(const Stream& stream);

    Position position(const Stream& stream) const;
    // Makes what the stream records later come after `position`; the stream takes part from now on.
    void join(Stream& stream, const Position& position);

    // Makes the capture invalid and throws.
    [[noreturn]] void refuse(std::int32_t status, const std::string& text);
    void require_valid() const;

    // Ends the capture on the stream it began on, whose other streams have to be joined, and returns its graph.
    std::shared_ptr<Graph> end(const Stream& stream);

  private:
    void invalidate(const std::string& text);
    void require_end(const Stream& stream) const;
    bool is_joined() const;
    void leave_streams();

    const std::shared_ptr<Graph> graph_;
    const Stream* const origin_;
    const aclmdlRICaptureMode mode_;
    const std::thread::id thread_ = std::this_thread::get_id();
    const std::unique_ptr<ShadowMemory> shadow_;
    mutable std::mutex mutex_;
    std::vector<Stream*> streams_;
    std::map<const Stream*, Position> positions_;
    // The groups that have no end yet.
    std::map<const Stream*, std::vector<std::size_t>> groups_;
    std::optional<std::string> invalid_because_;
    bool is_over_ = false;
};

Handles<Graph>& graphs();

// Begins a capture on the stream.
void begin_capture(Stream& stream, aclmdlRICaptureMode mode);

// The mode of the calling thread: which captures forbid it calls that are unsafe while something is captured.
aclmdlRICaptureMode exchange_capture_mode(aclmdlRICaptureMode mode);

// Throws, and makes the captures invalid, if a capture forbids the calling thread what is unsafe meanwhile: copies and
// fills that the host waits for.
void require_safe(const char* what);
// The same for what waits for all streams of a device.
void require_uncaptured_device(std::int32_t device, const char* what);
// The same for what waits for a stream.
void require_uncaptured(const Stream& stream, const char* what);

}  // namespace host_npu
