// What captures refuse, and when.
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "tests/graphs.h"

namespace {

using namespace test;

struct Refusal {
    const char* name;
    std::function<aclError(const Stream&, const Memory&)> call;
    aclError status;
};

const Case refusals{
    "graphs/what_a_capture_excludes_makes_it_invalid", [] {
        const Event outside;
        const Stream other;
        outside.record(other);
        std::vector<std::uint8_t> host(4);
        const auto download = [&host](const Stream& stream, const Memory& memory) {
            return aclrtMemcpyAsync(host.data(), 4, memory.address(), 4, ACL_MEMCPY_DEVICE_TO_HOST, stream.handle);
        };
        const Refusal table[] = {
            {"a wait for the stream",
             [](const Stream& stream, const Memory&) { return aclrtSynchronizeStream(stream.handle); },
             kStreamCaptured},
            {"a wait for the device", [](const Stream&, const Memory&) { return aclrtSynchronizeDevice(); },
             kStreamCaptured},
            {"a question",
             [](const Stream& stream, const Memory&) {
                 auto status = ACL_STREAM_STATUS_COMPLETE;
                 return aclrtStreamQuery(stream.handle, &status);
             },
             kStreamCaptured},
            {"the end of the stream",
             [](const Stream& stream, const Memory&) { return aclrtDestroyStream(stream.handle); }, kStreamCaptured},
            {"a copy that waits",
             [&](const Stream&, const Memory& memory) {
                 return aclrtMemcpy(host.data(), 4, memory.address(), 4, ACL_MEMCPY_DEVICE_TO_HOST);
             },
             kNotInThisMode},
            {"a fill that waits",
             [](const Stream&, const Memory& memory) { return aclrtMemset(memory.address(), 4, 0, 4); },
             kNotInThisMode},
            {"a copy to pageable memory", download, kNotInThisMode},
            {"an event of before", [&](const Stream& stream, const Memory&) { return outside.wait(stream); },
             kDependency},
        };
        for (const auto& row : table) {
            const Stream stream;
            const auto memory = memory_of(1);
            begin(stream);
            expect_equal(row.call(stream, memory), row.status, row.name);
            expect_equal(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED, row.name);
            expect_equal(fill(memory, 3, stream), kInvalidated, row.name, ": a fill afterwards");
            end_without_graph(stream, kInvalidated, "this was refused while it was under way");
            expect_equal(fill(memory, 4, stream), 0, row.name, ": a fill after the end");
            expect_equal(stream.wait(), 0, row.name, ": a synchronisation after the end");
            expect_equal(first(memory), 4, row.name, ": the value");
        }
    }};

const Case modes{"graphs/a_mode_says_which_threads_may_copy", [] {
                     struct Row {
                         aclmdlRICaptureMode mode;
                         aclmdlRICaptureMode of_thread;
                         bool is_same_thread;
                         bool may_copy;
                     };
                     const Row table[] = {
                         {kGlobal, kGlobal, true, false},      {kGlobal, kGlobal, false, false},
                         {kGlobal, kThreadLocal, true, false}, {kGlobal, kThreadLocal, false, true},
                         {kGlobal, kRelaxed, true, true},      {kThreadLocal, kGlobal, true, false},
                         {kThreadLocal, kGlobal, false, true}, {kRelaxed, kGlobal, true, true},
                     };
                     for (const auto& row : table) {
                         const Stream stream;
                         const auto memory = memory_of(1);
                         begin(stream, row.mode);
                         aclError status = 0;
                         const auto copy_in_mode = [&] {
                             aclrtSetDevice(0);
                             auto mode = row.of_thread;
                             aclmdlRICaptureThreadExchangeMode(&mode);
                             expect_equal(mode, kGlobal, "the mode before");
                             status = aclrtMemset(memory.address(), 4, 0, 4);
                             aclmdlRICaptureThreadExchangeMode(&mode);
                             expect_equal(mode, row.of_thread, "the mode");
                         };
                         if (row.is_same_thread) {
                             copy_in_mode();
                         } else {
                             std::thread(copy_in_mode).join();
                         }
                         expect_equal(status, row.may_copy ? 0 : kNotInThisMode, "mode ", row.mode, " and ",
                                      row.of_thread, " in the ", row.is_same_thread ? "same" : "other", " thread");
                         aclmdlRI graph = nullptr;
                         expect_equal(aclmdlRICaptureEnd(stream.handle, &graph), row.may_copy ? 0 : kInvalidated,
                                      "the status of the end");
                         if (graph != nullptr) aclmdlRIDestroy(graph);
                         recent_error();
                     }
                 }};

const Case ends{"graphs/a_capture_ends_once_where_it_began", [] {
                    const Stream stream, side;
                    const Event forked;
                    aclmdlRI graph = nullptr;
                    expect_equal(aclmdlRICaptureEnd(stream.handle, &graph), kNotCaptured, "an end without beginning");
                    begin(stream);
                    expect_equal(aclmdlRICaptureBegin(stream.handle, kGlobal), kStreamCaptured, "a second beginning");
                    forked.record(stream);
                    expect_equal(forked.wait(side), 0, "the status of the fork");
                    expect_equal(aclmdlRICaptureEnd(side.handle, &graph), kUnmatched, "an end on another stream");
                    aclError in_thread = 0;
                    std::thread([&] { in_thread = aclmdlRICaptureEnd(stream.handle, &graph); }).join();
                    expect_equal(in_thread, kWrongThread, "an end in another thread");
                    auto status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
                    expect_equal(aclmdlRICaptureGetInfo(side.handle, &status, &graph), 0, "the question");
                    expect_equal(aclmdlRIExecuteAsync(graph, stream.handle), kModelCaptured, "a replay too early");
                    expect_equal(aclmdlRIDestroy(graph), kModelCaptured, "a destruction too early");
                    expect_equal(end(stream), graph, "the graph");
                    expect_equal(aclmdlRIDestroy(graph), 0, "the status of the destruction");
                    expect_equal(aclmdlRICaptureEnd(stream.handle, &graph), kNotCaptured, "a second end");
                    recent_error();
                }};

const Case old_chip{"graphs/an_ascend910_captures_nothing",
                    [] {
                        const Stream stream;
                        expect(aclmdlRICaptureBegin(stream.handle, kGlobal) != 0, "the capture began");
                        const auto message = recent_error().value_or("");
                        expect(message.find("the Ascend910 does not capture graphs") != message.npos, message);
                    },
                    {"Ascend910"}};

}  // namespace
