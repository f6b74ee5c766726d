// Captures: tasks enqueued on captured streams are recorded and replayed as a graph.
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

// Tasks of a graph that an update can replace with other launches of the same operators.
struct TaskGroup {
    std::weak_ptr<Graph> graph;
    // Indices into the tasks of the graph.
    std::vector<std::size_t> places;
};

Handles<TaskGroup>& task_groups();

// Captured tasks, in a valid sequential order.
class Graph {
  public:
    explicit Graph(std::int32_t device);
    // Destroys the task groups, too.
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    std::int32_t device() const { return device_; }
    std::uint32_t id() const { return id_; }
    bool is_complete() const { return is_complete_; }
    std::size_t size() const;
    // The current task at this index.
    std::shared_ptr<const Task> task(std::size_t place) const;

    // Returns the index of the task.
    std::size_t add(Task task);
    void replace(std::size_t place, Task task);
    void* add_group(std::shared_ptr<TaskGroup> group);
    void complete() { is_complete_ = true; }

    // Locked by a replay: replays of the same graph do not overlap.
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

// An active capture: the participating streams and their recorded tasks. Refusing an operation, as a device does, makes
// the capture invalid; it can then only be ended. Thread-safe.
class Capture : public std::enable_shared_from_this<Capture> {
  public:
    // The number of preceding tasks on each stream.
    using Position = std::map<const Stream*, std::uint64_t>;

    Capture(std::shared_ptr<Graph> graph, Stream& origin, aclmdlRICaptureMode mode);
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;

    const std::shared_ptr<Graph>& graph() const { return graph_; }
    bool is_valid() const;
    bool is_over() const;
    bool began_in_this_thread() const { return thread_ == std::this_thread::get_id(); }
    aclmdlRICaptureMode mode() const { return mode_; }

    // Records the task. A rehearsed task first runs on the shadow memory.
    void record(const Stream& stream, Task task);
    // The copy of device memory that rehearsed tasks read and write.
    ShadowMemory& shadow() { return *shadow_; }

    // Tasks that the stream records between these calls form a task group. Returns its handle.
    void begin_group(const Stream& stream);
    void* end_group(const Stream& stream);

    Position position(const Stream& stream) const;
    // Orders later tasks of the stream after `position`. The stream takes part from now on.
    void join(Stream& stream, const Position& position);

    // Makes the capture invalid and throws.
    [[noreturn]] void refuse(std::int32_t status, const std::string& text);
    void require_valid() const;

    // Ends the capture and returns its graph. `stream` must be the origin, and all other streams must have joined it.
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
    // The groups that have not ended.
    std::map<const Stream*, std::vector<std::size_t>> groups_;
    std::optional<std::string> invalid_because_;
    bool is_over_ = false;
};

Handles<Graph>& graphs();

void begin_capture(Stream& stream, aclmdlRICaptureMode mode);

// Sets the calling thread's mode, which selects the captures that forbid unsafe calls. Returns the previous mode.
aclmdlRICaptureMode exchange_capture_mode(aclmdlRICaptureMode mode);

// Throws and invalidates captures that forbid unsafe calls, such as blocking copies and fills, on the calling thread.
void require_safe(const char* what);
// The same for a call that waits for all streams of a device.
void require_uncaptured_device(std::int32_t device, const char* what);
// The same for a call that waits for a stream.
void require_uncaptured(const Stream& stream, const char* what);

}  // namespace host_npu
