// The timer slack of torch_npu's threads. For each queue, torch_npu has a thread that frees completed work and
// otherwise sleeps for 2 microseconds at a time. On a device this goes unnoticed; here, with Linux's default timer
// slack of 50 microseconds, it takes a fifth of a core from the kernels. A thread inherits the slack of its creator,
// and torch_npu creates this thread right after it has created a stream and set its failure mode.
#pragma once

namespace host_npu {

// Lets threads that this thread creates before its next call wake up to a millisecond late.
void let_new_threads_wake_up_late();

// Restores this thread's previous timer slack.
void wake_up_in_time();

}  // namespace host_npu
