#include "ascendcl/queue.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "acl/acl_rt.h"
#include "ascendcl/error.h"

namespace host_npu {
namespace {

struct FailureInQueue {
    std::mutex mutex;
    // Read in every call, and false but for the end of a queue.
    std::atomic<bool> happened = false;
    std::thread::id thread;
    std::string text;
};

FailureInQueue& failure_in_queue() {
    static auto& of_process = *new FailureInQueue;
    return of_process;
}

// torch_npu names the threads of its queues so.
bool is_thread_of_queue() {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    return std::string_view(name.data()) == "acl_thread";
}

}  // namespace

void note_failure(const std::string& text) {
    if (!is_thread_of_queue()) return;
    auto& last = failure_in_queue();
    const std::lock_guard lock(last.mutex);
    if (last.happened) return;
    last.thread = std::this_thread::get_id();
    last.text = text;
    last.happened = true;
}

void queue_goes_on() {
    auto& last = failure_in_queue();
    if (!last.happened) return;
    const std::lock_guard lock(last.mutex);
    if (last.thread == std::this_thread::get_id()) last.happened = false;
}

std::optional<std::string> end_of_queue() {
    auto& last = failure_in_queue();
    if (!last.happened) return std::nullopt;
    const std::lock_guard lock(last.mutex);
    return "torch_npu's queue has ended, so nothing that was called since has been computed; restart the process. It "
           "ended with: " +
           last.text;
}

void require_queue() {
    if (const auto end = end_of_queue()) throw Error(ACL_ERROR_RT_INTERNAL_ERROR, *end);
}

}  // namespace host_npu
