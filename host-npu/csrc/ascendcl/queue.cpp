#include "ascendcl/queue.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "acl/acl_rt.h"
#include "ascendcl/error.h"

namespace host_npu {
namespace {

struct End {
    std::thread::id thread;
    std::string text;
};

struct Queues {
    // Read in every call; false until something fails.
    std::atomic<bool> have_failed = false;
    std::mutex mutex;
    std::optional<End> end;
    // Threads with a failure that may or may not have ended their queue.
    std::map<std::thread::id, std::string> undecided;
    std::condition_variable decided;
    // A refusal on the thread of a queue that no call has raised yet.
    std::optional<std::string> refusal;
};

Queues& queues() {
    static auto& all = *new Queues;
    return all;
}

// The time within which a thread continues after a failure. After that it has ended, or drops all further tasks.
constexpr std::chrono::seconds patience{1};

bool names(std::string_view text, std::string_view part) {
    return text.substr(0, text.find(':')).find(part) != text.npos;
}

// Whether torch_npu may ignore or retry the failed call, but may also stop its queue.
bool may_stop(std::string_view text) { return names(text, "Malloc") || names(text, "DestroyEvent"); }

// Whether torch_npu may continue after the failed call: it ignores failures to destroy an object.
bool may_go_on(std::string_view text) { return may_stop(text) || names(text, "Destroy") || names(text, "Free"); }

// The last failure on the thread of a queue. If the thread exits without continuing, the queue has ended.
class LastFailure {
  public:
    LastFailure() = default;
    LastFailure(const LastFailure&) = delete;
    LastFailure& operator=(const LastFailure&) = delete;
    ~LastFailure() {
        if (text_) end_queue();
    }

    void set(const std::string& text) {
        queues().have_failed = true;
        text_ = text;
        if (!may_go_on(text)) {
            end_queue();
        } else if (may_stop(text)) {
            const std::lock_guard lock(queues().mutex);
            queues().undecided.insert_or_assign(std::this_thread::get_id(), text);
        }
    }

    void forget() {
        if (!text_) return;
        text_.reset();
        auto& all = queues();
        const std::lock_guard lock(all.mutex);
        if (all.end && all.end->thread == std::this_thread::get_id()) all.end.reset();
        decide();
    }

  private:
    void end_queue() {
        auto& all = queues();
        const std::lock_guard lock(all.mutex);
        if (!all.end) all.end = {std::this_thread::get_id(), *text_};
        decide();
    }

    static void decide() {
        queues().undecided.erase(std::this_thread::get_id());
        queues().decided.notify_all();
    }

    std::optional<std::string> text_;
};

LastFailure& last_failure() {
    thread_local LastFailure of_thread;
    return of_thread;
}

}  // namespace

// torch_npu gives this name to the threads of its queues.
bool is_thread_of_queue() {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    return std::string_view(name.data()) == "acl_thread";
}

void note_failure(const std::string& text) {
    if (is_thread_of_queue()) last_failure().set(text);
}

bool refuse_after_queue(const std::string& text) {
    if (!is_thread_of_queue()) return false;
    auto& all = queues();
    all.have_failed = true;
    const std::lock_guard lock(all.mutex);
    if (!all.refusal) all.refusal = text;
    return true;
}

void queue_goes_on() {
    if (queues().have_failed && is_thread_of_queue()) last_failure().forget();
}

void require_queue() {
    auto& all = queues();
    if (!all.have_failed) return;
    std::unique_lock lock(all.mutex);
    if (!is_thread_of_queue() && !all.decided.wait_for(lock, patience, [&] { return all.undecided.empty(); })) {
        const auto [thread, text] = *all.undecided.begin();
        if (!all.end) all.end = {thread, text};
        all.undecided.clear();
    }
    if (all.refusal && !is_thread_of_queue()) {
        // Not ACL_ERROR_RT_FEATURE_NOT_SUPPORT: torch_npu would only warn.
        throw Error(ACL_ERROR_RT_INTERNAL_ERROR, *std::exchange(all.refusal, std::nullopt));
    }
    if (!all.end || all.end->thread == std::this_thread::get_id()) return;
    throw Error(ACL_ERROR_RT_INTERNAL_ERROR,
                "torch_npu's task queue has ended, so nothing that was called since has been computed; restart the "
                "process. It ended with: " +
                    all.end->text);
}

}  // namespace host_npu
