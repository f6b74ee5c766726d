#include "ascendcl/error.h"

#include <algorithm>
#include <atomic>
#include <iostream>
#include <mutex>
#include <string_view>

#include "acl/acl_rt.h"
#include "ascendcl/queue.h"

namespace host_npu {
namespace {

// CANN's limit on the length of messages, in bytes.
constexpr std::size_t kLongestMessage = 1024;

struct Messages {
    std::string unread;
    // The string that aclGetRecentErrMsg returned last, valid until the next call.
    std::string read;
};

std::atomic<bool> shared{false};
std::mutex shared_mutex;

Messages& messages_of_process() {
    static auto& messages = *new Messages;
    return messages;
}

Messages& messages_of_thread() {
    thread_local Messages messages;
    return messages;
}

Messages& messages() { return shared ? messages_of_process() : messages_of_thread(); }

thread_local std::int32_t last_status = ACL_SUCCESS;

std::string_view error_code(std::int32_t status) {
    if (status >= 500000) return "EZ9999";
    if (status >= 300000) return "EZ9903";
    return "EZ1001";
}

}  // namespace

void report_error(std::int32_t status, const std::string& text) {
    note_failure(text);
    const std::lock_guard lock(shared_mutex);
    auto& unread = messages().unread;
    if (!unread.empty()) unread += '\n';
    unread += std::string(error_code(status)) + ": " + text.substr(0, kLongestMessage);
}

std::int32_t failed(const char* function, std::int32_t status, const std::string& text) noexcept {
    // After any failure, torch_npu reads this status first. "Not supported" only warns, and would hide a later failure.
    if (status != ACL_ERROR_RT_FEATURE_NOT_SUPPORT) last_status = status;
    try {
        report_error(status, std::string(function) + ": " + text);
    } catch (const std::exception&) {
        std::cerr << "host NPU: no memory for the message of " << function << '\n';
    }
    return status;
}

std::int32_t refused_in_capture(const char* function, const RefusedInCapture& refusal) noexcept {
    const auto text = std::string(function) + ": " + refusal.what();
    if (is_thread_of_queue() && (refusal.is_reported_at_end() || refuse_after_queue(text))) return ACL_SUCCESS;
    return failed(function, refusal.status(), refusal.what());
}

void share_messages_between_threads() { shared = true; }

std::int32_t last_error(bool forget) {
    const auto status = last_status;
    if (forget) last_status = ACL_SUCCESS;
    return status;
}

void forget_errors() {
    last_status = ACL_SUCCESS;
    const std::lock_guard lock(shared_mutex);
    messages().unread.clear();
}

void throw_if_injected(const char* function) {
    if (const auto failure = injected_failure(function)) throw Error(failure->first, failure->second);
}

}  // namespace host_npu

const char* aclGetRecentErrMsg() {
    using namespace host_npu;
    const std::lock_guard lock(shared_mutex);
    auto& [unread, read] = messages();
    if (unread.empty()) return nullptr;
    read = std::exchange(unread, {});
    return read.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return host_npu::last_error(false); }

aclError aclrtGetLastError(aclrtLastErrLevel) { return host_npu::last_error(true); }
