// How often torch_npu's threads wake up. For each queue torch_npu has a thread that frees what the queue has done;
// where there is nothing to free it sleeps for 2 microseconds, over and over. On a device that goes unnoticed. Here it
// takes a fifth of a core, and one that the kernels compute on: Linux wakes a thread later by its timer slack, 50
// microseconds by default. A thread has the slack of the thread that makes it, and torch_npu makes this one as soon as
// it has made a stream and set what follows a failure.
#pragma once

namespace host_npu {

// Lets the threads that this thread makes before its next call wake up from sleep up to a millisecond later.
void let_new_threads_wake_up_late();

// Gives this thread the timer slack back that it had before.
void wake_up_in_time();

}  // namespace host_npu
