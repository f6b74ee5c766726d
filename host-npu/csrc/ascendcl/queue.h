// torch_npu's queue, whose thread makes the calls that its operators have put there. The first of them that fails ends
// the queue and its thread, unless torch_npu ignores it: torch_npu raises that once, and drops without a word whatever
// is put there later. So results that nobody has computed must not be read after it.
#pragma once

namespace host_npu {

// Throws if the queue has ended, with the error that ended it, or has refused something, once.
void require_queue();

// The calling thread goes on: if it is a queue's, its last failure has not ended the queue.
void queue_goes_on();

// Whether the calling thread is a queue's.
bool is_thread_of_queue();

}  // namespace host_npu
