#include "ascendcl/capture.h"

#include <algorithm>
#include <utility>

#include "ascendcl/memory.h"
#include "ascendcl/stream.h"

namespace host_npu {
namespace {

std::atomic<std::uint32_t> next_graph_id{1};

// The active captures.
struct Captures {
    std::atomic<int> count = 0;
    std::mutex mutex;
    std::vector<std::shared_ptr<Capture>> all;
};

Captures& captures() {
    static auto& under_way = *new Captures;
    return under_way;
}

std::vector<std::shared_ptr<Capture>> captures_now() {
    auto& under_way = captures();
    const std::lock_guard lock(under_way.mutex);
    return under_way.all;
}

void remove_from_captures(const Capture& capture) {
    auto& under_way = captures();
    const std::lock_guard lock(under_way.mutex);
    under_way.count -=
        static_cast<int>(std::erase_if(under_way.all, [&](const auto& other) { return other.get() == &capture; }));
}

aclmdlRICaptureMode& mode_of_thread() {
    thread_local auto mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    return mode;
}

// Whether the capture forbids unsafe calls on the calling thread.
bool forbids(const Capture& capture) {
    if (capture.mode() == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    switch (mode_of_thread()) {
        case ACL_MODEL_RI_CAPTURE_MODE_RELAXED:
            return false;
        case ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL:
            return capture.began_in_this_thread();
        default:
            return capture.began_in_this_thread() || capture.mode() == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    }
}

constexpr const char* kWhileCaptured = " is not possible while a graph is captured";

}  // namespace

bool captures_are_under_way() { return captures().count.load(std::memory_order_relaxed) > 0; }

Handles<TaskGroup>& task_groups() {
    static auto& all = *new Handles<TaskGroup>("aclrtTaskGrp");
    return all;
}

Graph::Graph(std::int32_t device) : device_(device), id_(next_graph_id++) {}

Graph::~Graph() {
    for (const void* group : groups_) task_groups().remove(group);
}

std::size_t Graph::size() const {
    const std::lock_guard lock(mutex_);
    return tasks_.size();
}

std::shared_ptr<const Task> Graph::task(std::size_t place) const {
    const std::lock_guard lock(mutex_);
    return tasks_[place];
}

std::size_t Graph::add(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::make_shared<const Task>(std::move(task)));
    return tasks_.size() - 1;
}

void Graph::replace(std::size_t place, Task task) {
    const std::lock_guard lock(mutex_);
    tasks_[place] = std::make_shared<const Task>(std::move(task));
}

void* Graph::add_group(std::shared_ptr<TaskGroup> group) {
    void* const handle = task_groups().add(std::move(group));
    groups_.push_back(handle);
    return handle;
}

Capture::Capture(std::shared_ptr<Graph> graph, Stream& origin, aclmdlRICaptureMode mode)
    : graph_(std::move(graph)), origin_(&origin), mode_(mode), shadow_(DeviceMemory::instance().shadow()) {}

bool Capture::is_valid() const {
    const std::lock_guard lock(mutex_);
    return !invalid_because_;
}

bool Capture::is_over() const {
    const std::lock_guard lock(mutex_);
    return is_over_;
}

void Capture::require_valid() const {
    const std::lock_guard lock(mutex_);
    if (!invalid_because_) return;
    throw RefusedInCapture(
        ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
        "the capture is invalid, so nothing more is recorded, since this was refused: " + *invalid_because_, true);
}

void Capture::record(const Stream& stream, Task task) {
    require_valid();
    if (task.captured == Captured::rehearsed) {
        const ShadowMemory::Use use(*shadow_);
        try {
            task.work();
        } catch (const std::exception&) {
            // A device computes nothing during a capture. The replay reports this failure.
        }
    }
    const std::lock_guard lock(mutex_);
    ++positions_[&stream][&stream];
    const auto place = graph_->add(std::move(task));
    if (const auto group = groups_.find(&stream); group != groups_.end()) group->second.push_back(place);
}

void Capture::begin_group(const Stream& stream) {
    require_valid();
    const std::lock_guard lock(mutex_);
    if (!groups_.try_emplace(&stream).second) {
        throw Error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group has begun on the stream already");
    }
}

void* Capture::end_group(const Stream& stream) {
    require_valid();
    const std::lock_guard lock(mutex_);
    auto group = groups_.extract(&stream);
    if (group.empty()) throw Error(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group has begun on the stream");
    return graph_->add_group(std::make_shared<TaskGroup>(TaskGroup{graph_, std::move(group.mapped())}));
}

Capture::Position Capture::position(const Stream& stream) const {
    require_valid();
    const std::lock_guard lock(mutex_);
    const auto found = positions_.find(&stream);
    return found == positions_.end() ? Position{} : found->second;
}

void Capture::join(Stream& stream, const Position& position) {
    const auto other = stream.capture();
    if (other && other.get() != this) {
        constexpr const char* text = "a captured stream waits for an event of another capture";
        invalidate(text);
        other->refuse(ACL_ERROR_RT_CAPTURE_DEPENDENCY, text);
    }
    require_valid();
    const std::lock_guard lock(mutex_);
    if (!other) {
        stream.set_capture(shared_from_this());
        streams_.push_back(&stream);
    }
    auto& own = positions_[&stream];
    for (const auto& [recorder, count] : position) own[recorder] = std::max(own[recorder], count);
}

void Capture::invalidate(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (!invalid_because_) invalid_because_ = text;
}

void Capture::refuse(std::int32_t status, const std::string& text) {
    invalidate(text);
    throw RefusedInCapture(status, text, true);
}

void Capture::require_end(const Stream& stream) const {
    if (&stream != origin_) {
        throw Error(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on this stream");
    }
    if (mode_ != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && !began_in_this_thread()) {
        throw Error(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "the capture did not begin in this thread");
    }
}

bool Capture::is_joined() const {
    const auto joined = positions_.find(origin_);
    for (const auto& [stream, position] : positions_) {
        const auto own = position.find(stream);
        if (stream == origin_ || own == position.end()) continue;
        if (joined == positions_.end()) return false;
        const auto seen = joined->second.find(stream);
        if (seen == joined->second.end() || seen->second < own->second) return false;
    }
    return true;
}

void Capture::leave_streams() {
    for (auto* const stream : streams_) stream->set_capture(nullptr);
    streams_.clear();
}

std::shared_ptr<Graph> Capture::end(const Stream& stream) {
    require_end(stream);
    const auto self = shared_from_this();
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    leave_streams();
    remove_from_captures(*this);
    if (!invalid_because_ && is_joined()) {
        graph_->complete();
        return graph_;
    }
    graphs().remove(graph_.get());
    if (invalid_because_) {
        throw Error(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                    "the capture has no graph, because this was refused while it was under way: " + *invalid_because_);
    }
    throw Error(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "the capture has no graph, because a stream that took part has work that the first stream has not "
                "waited for: let the first stream wait for an event that the other records at its end");
}

Handles<Graph>& graphs() {
    static auto& all = *new Handles<Graph>("aclmdlRI");
    return all;
}

void begin_capture(Stream& stream, aclmdlRICaptureMode mode) {
    if (stream.capture()) throw Error(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured already");
    const auto graph = std::make_shared<Graph>(stream.device());
    const auto capture = std::make_shared<Capture>(graph, stream, mode);
    // Finish earlier tasks first: the shadow copies the memory that they write.
    stream.finish();
    graphs().add(graph);
    {
        auto& under_way = captures();
        const std::lock_guard lock(under_way.mutex);
        under_way.all.push_back(capture);
        ++under_way.count;
    }
    capture->join(stream, {});
}

aclmdlRICaptureMode exchange_capture_mode(aclmdlRICaptureMode mode) { return std::exchange(mode_of_thread(), mode); }

void require_safe(const char* what) {
    if (!captures_are_under_way()) return;
    for (const auto& capture : captures_now()) {
        if (forbids(*capture))
            capture->refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, std::string(what) + kWhileCaptured);
    }
}

void require_uncaptured_device(std::int32_t device, const char* what) {
    if (!captures_are_under_way()) return;
    for (const auto& capture : captures_now()) {
        if (capture->graph()->device() != device) continue;
        capture->refuse(ACL_ERROR_RT_STREAM_CAPTURED, std::string(what) + kWhileCaptured);
    }
}

void require_uncaptured(const Stream& stream, const char* what) {
    if (const auto capture = stream.capture()) {
        capture->refuse(ACL_ERROR_RT_STREAM_CAPTURED, std::string(what) + kWhileCaptured + " on this stream");
    }
}

}  // namespace host_npu
