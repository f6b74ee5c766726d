#include "ascendcl/wake_ups.h"

#include <sys/prctl.h>

#include <chrono>

namespace host_npu {
namespace {

constexpr std::chrono::nanoseconds kLate = std::chrono::milliseconds(1);

// The thread's original slack while it is replaced, else 0.
thread_local unsigned long own_slack = 0;

}  // namespace

void let_new_threads_wake_up_late() {
    const int slack = prctl(PR_GET_TIMERSLACK);
    // A longer slack was set on purpose.
    if (slack <= 0 || slack >= kLate.count()) return;
    if (prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(kLate.count())) == 0) {
        own_slack = static_cast<unsigned long>(slack);
    }
}

void wake_up_in_time() {
    if (own_slack == 0) return;
    prctl(PR_SET_TIMERSLACK, own_slack);
    own_slack = 0;
}

}  // namespace host_npu
