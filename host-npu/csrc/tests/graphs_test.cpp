// Captured graphs: what the runtime records and replays.
#include "tests/graphs.h"

#include <cstdint>

namespace {

using namespace test;

const Case replays{"graphs/replays_do_what_was_captured", [] {
                       const Stream stream, other;
                       const auto from = memory_of(1), to = memory_of(2), last = memory_of(3);
                       begin(stream);
                       expect_equal(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE, "the state");
                       expect_equal(status_of(other), ACL_MODEL_RI_CAPTURE_STATUS_NONE, "the other stream's state");
                       expect_equal(copy(to, from, stream), 0, "the status of a copy");
                       expect_equal(copy(last, to, stream), 0, "the status of a copy");
                       expect_equal(fill(from, 9, stream), 0, "the status of a fill");
                       auto* const graph = end(stream);
                       expect_equal(first(from), 1, "what is filled, before the replay");
                       expect_equal(first(last), 3, "what is copied to, before the replay");
                       replay(graph, other);
                       expect_equal(first(last), 1, "what is copied to, after the first replay");
                       replay(graph, stream);
                       expect_equal(first(last), 9, "what is copied to, after the second replay");
                       expect_equal(aclmdlRIDestroy(graph), 0, "the status of the destruction");
                       expect_equal(aclmdlRIDestroy(graph), kNoHandle, "the status of the second destruction");
                       expect_equal(aclmdlRIExecuteAsync(graph, stream.handle), kNoHandle, "a graph that is gone");
                       recent_error();
                   }};

const Case faults{"graphs/a_replay_of_memory_that_is_gone_is_a_fault", [] {
                      const Stream stream;
                      const auto kept = memory_of(1);
                      aclmdlRI graph = nullptr;
                      {
                          const auto gone = memory_of(2);
                          begin(stream);
                          expect_equal(copy(kept, gone, stream), 0, "the status of a copy");
                          expect_equal(fill(kept, 5, stream), 0, "the status of a fill");
                          graph = end(stream);
                      }
                      expect_equal(aclmdlRIExecuteAsync(graph, stream.handle), 0, "the status of the replay");
                      expect(stream.wait() != 0, "the synchronisation succeeded");
                      const auto message = recent_error().value_or("");
                      expect(message.find("aclrtMemcpyAsync failed on stream") != message.npos, message);
                      expect_equal(first(kept), 5, "what comes after the fault");
                      expect_equal(aclmdlRIDestroy(graph), 0, "the status of the destruction");
                  }};

}  // namespace
