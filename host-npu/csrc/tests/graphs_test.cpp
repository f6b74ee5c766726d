// Captured graphs: what they record and replay, and how streams take part.
#include "tests/graphs.h"

#include <cstdint>
#include <utility>

#include "aclnnop/aclnn_mse_loss.h"

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

const Case launches{"graphs/launches_of_operators_are_captured", [] {
                        const auto self = floats({3}, {1, 2, 3}), target = floats({3}, {1}), out = floats({}, {7});
                        const Stream stream;
                        std::uint64_t size = 0;
                        aclOpExecutor* executor = nullptr;
                        expect_equal(aclnnMseLossGetWorkspaceSize(self, target, 2, out, &size, &executor), 0, "one");
                        const Memory workspace(size);
                        begin(stream);
                        expect_equal(aclnnMseLoss(workspace.address(), size, executor, stream.handle), 0, "two");
                        auto* const graph = end(stream);
                        expect_equal(out.values()[0], 7.0, "the loss before a replay");
                        for (const auto& [value, loss] : {std::pair{1.0, 5.0}, std::pair{2.0, 2.0}}) {
                            target.set({value, value, value});
                            replay(graph, stream);
                            expect_equal(out.values()[0], loss, "the loss after a replay");
                        }
                        expect_equal(aclmdlRIDestroy(graph), 0, "the status of the destruction");
                    }};

const Case forks{"graphs/streams_fork_and_join_by_events", [] {
                     const Stream stream, side;
                     const auto from = memory_of(1), between = memory_of(2), to = memory_of(3);
                     const Event forked, joined;
                     begin(stream);
                     expect_equal(fill(from, 8, stream), 0, "the status of a fill");
                     forked.record(stream);
                     expect_equal(forked.wait(side), 0, "the status of the fork");
                     expect_equal(status_of(side), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE, "the side stream's state");
                     expect_equal(copy(between, from, side), 0, "the status of a copy");
                     joined.record(side);
                     expect_equal(joined.wait(stream), 0, "the status of the join");
                     expect_equal(copy(to, between, stream), 0, "the status of a copy");
                     auto* const graph = end(stream);
                     expect_equal(status_of(side), ACL_MODEL_RI_CAPTURE_STATUS_NONE, "the side stream's last state");
                     expect_equal(first(to), 3, "the last copy before the replay");
                     replay(graph, stream);
                     expect_equal(first(to), 8, "the last copy after the replay");
                     expect_equal(aclmdlRIDestroy(graph), 0, "the status of the destruction");
                     expect_equal(aclrtSynchronizeEvent(joined.handle), kEventCaptured, "a wait for its event");
                     expect_equal(joined.wait(stream), kEventCaptured, "a stream's wait for its event");
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
