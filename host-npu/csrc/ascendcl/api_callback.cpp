// Host functions on streams, which run on the stream's thread or on a subscribed thread.
#include <pthread.h>

#include <deque>
#include <map>

#include "acl/acl.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"

using namespace host_npu;

namespace {

// The callbacks that a subscribed thread runs.
struct Mailbox {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> callbacks;
    // The number of subscribed streams.
    int subscriptions = 0;
};

struct Subscriptions {
    std::mutex mutex;
    std::map<std::uint64_t, std::shared_ptr<Mailbox>> by_thread;
    std::map<const Stream*, std::uint64_t> thread_of;
};

Subscriptions& subscriptions() {
    static auto& all = *new Subscriptions;
    return all;
}

std::shared_ptr<Mailbox> mailbox_of(const Stream* stream) {
    auto& all = subscriptions();
    const std::lock_guard lock(all.mutex);
    const auto found = all.thread_of.find(stream);
    if (found == all.thread_of.end()) {
        throw Error(ACL_ERROR_RT_STREAM_NO_CB_REG, "no thread has subscribed to the stream's callbacks");
    }
    return all.by_thread.at(found->second);
}

// Queues the callback. If it blocks the stream, waits until it has run.
void deliver(const std::shared_ptr<Mailbox>& mailbox, aclrtCallback function, void* argument, bool blocks) {
    auto has_run = std::make_shared<bool>(false);
    std::unique_lock lock(mailbox->mutex);
    mailbox->callbacks.emplace_back([mailbox, function, argument, has_run] {
        function(argument);
        const std::lock_guard done(mailbox->mutex);
        *has_run = true;
        mailbox->changed.notify_all();
    });
    mailbox->changed.notify_all();
    if (blocks) mailbox->changed.wait(lock, [&] { return *has_run; });
}

}  // namespace

aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream) {
    return run_api(__func__, [&] {
        const auto target = stream_of(stream);
        auto& all = subscriptions();
        const std::lock_guard lock(all.mutex);
        if (!all.thread_of.emplace(target.get(), threadId).second) {
            throw Error(ACL_ERROR_RT_STREAM_SUBSCRIBE, "a thread has subscribed to the stream already");
        }
        auto& mailbox = all.by_thread[threadId];
        if (!mailbox) mailbox = std::make_shared<Mailbox>();
        ++mailbox->subscriptions;
    });
}

aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream) {
    return run_api(__func__, [&] {
        const auto target = stream_of(stream);
        auto& all = subscriptions();
        const std::lock_guard lock(all.mutex);
        const auto found = all.thread_of.find(target.get());
        if (found == all.thread_of.end() || found->second != threadId) {
            throw Error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "the thread has not subscribed to the stream");
        }
        all.thread_of.erase(found);
        if (--all.by_thread.at(threadId)->subscriptions == 0) all.by_thread.erase(threadId);
    });
}

aclError aclrtProcessReport(int32_t timeout) {
    return run_api(__func__, [&] {
        std::shared_ptr<Mailbox> mailbox;
        {
            auto& all = subscriptions();
            const std::lock_guard lock(all.mutex);
            const auto found = all.by_thread.find(static_cast<std::uint64_t>(pthread_self()));
            if (found == all.by_thread.end()) {
                throw Error(ACL_ERROR_RT_THREAD_SUBSCRIBE, "this thread has subscribed to no stream");
            }
            mailbox = found->second;
        }
        std::unique_lock lock(mailbox->mutex);
        const auto arrived = [&] { return !mailbox->callbacks.empty(); };
        if (!wait_until(mailbox->changed, lock, timeout_from(timeout), arrived)) {
            throw Error(ACL_ERROR_RT_REPORT_TIMEOUT, "no callback has arrived in time");
        }
        const auto callback = std::move(mailbox->callbacks.front());
        mailbox->callbacks.pop_front();
        lock.unlock();
        callback();
    });
}

aclError aclrtLaunchCallback(aclrtCallback fn, void* userData, aclrtCallbackBlockType blockType, aclrtStream stream) {
    return run_api(__func__, [&] {
        require(reinterpret_cast<const void*>(fn), "fn");
        const auto target = stream_of(stream);
        const bool blocks = blockType == ACL_CALLBACK_BLOCK;
        target->enqueue_signal("aclrtLaunchCallback",
                               [=, mailbox = mailbox_of(target.get())] { deliver(mailbox, fn, userData, blocks); });
    });
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* args) {
    return run_api(__func__, [&] {
        require(reinterpret_cast<const void*>(fn), "fn");
        stream_of(stream)->enqueue_signal("aclrtLaunchHostFunc", [fn, args] { fn(args); });
    });
}
