// torch_npu's task queue, whose thread makes the calls of queued operators. The first call that fails ends the queue
// and its thread, unless torch_npu ignores the failure: torch_npu raises it once and silently drops all later tasks.
// Results that were not computed must not be read afterwards.
#pragma once

namespace host_npu {

// Throws the error that ended the queue, or a pending refusal, once.
void require_queue();

// Records that the calling thread continues: if it is a queue's, its last failure has not ended the queue.
void queue_goes_on();

// Whether the calling thread belongs to a queue.
bool is_thread_of_queue();

}  // namespace host_npu
