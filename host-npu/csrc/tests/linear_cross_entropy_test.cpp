// What the three operators of linear cross entropy accept and refuse.
#include "tests/calls.h"

namespace {

using namespace test;

const Case null_results_max_sum{"fused_linear_online_max_sum/null_results", [] { check_null_results<OnlineMaxSum>(); }};
const Case null_results_loss{"fused_cross_entropy_loss_with_max_sum/null_results",
                             [] { check_null_results<LossWithMaxSum>(); }};
const Case null_results_grad{"fused_linear_cross_entropy_loss_grad/null_results",
                             [] { check_null_results<LossGrad>(); }};

using Rows = std::vector<Row<OnlineMaxSum>>;

// Another dtype, rank or length in place of one tensor's.
Row<OnlineMaxSum> replaced(const char* name, Tensor OnlineMaxSum::* member, aclDataType dtype, Shape shape) {
    return {name, [=](OnlineMaxSum& call) { call.*member = {dtype, shape}; }, 161002};
}

Row<OnlineMaxSum> absent(const char* name, Tensor OnlineMaxSum::* member, aclnnStatus status = 161001) {
    return {name, [=](OnlineMaxSum& call) { call.*member = {}; }, status};
}

const Case refusals_max_sum{"fused_linear_online_max_sum/refusals", [] {
                                using Call = OnlineMaxSum;
                                check_rows<Call>(Rows{
                                    absent("no input", &Call::input),
                                    absent("no weight", &Call::weight),
                                    absent("no target", &Call::target),
                                    absent("no logitsMaxLocalOut", &Call::max),
                                    absent("no sumExpLogitsLocalOut", &Call::sum),
                                    absent("no predictedLogitsLocalOut", &Call::predicted),
                                    absent("no targetMaskOut", &Call::mask),
                                    absent("no maskedTargetOut", &Call::masked_target),
                                    absent("no logits, which are optional", &Call::logits, 0),
                                    replaced("input float32", &Call::input, ACL_FLOAT, {3, 4}),
                                    replaced("weight float32", &Call::weight, ACL_FLOAT, {5, 4}),
                                    replaced("weight bfloat16", &Call::weight, ACL_BF16, {5, 4}),
                                    replaced("target int8", &Call::target, ACL_INT8, {3}),
                                    replaced("max float16", &Call::max, ACL_FLOAT16, {3}),
                                    replaced("sum float16", &Call::sum, ACL_FLOAT16, {3}),
                                    replaced("predicted float16", &Call::predicted, ACL_FLOAT16, {3}),
                                    replaced("mask int8", &Call::mask, ACL_INT8, {1}),
                                    replaced("maskedTarget float16", &Call::masked_target, ACL_FLOAT16, {3}),
                                    replaced("maskedTarget int64", &Call::masked_target, ACL_INT64, {3}),
                                    replaced("logits float32", &Call::logits, ACL_FLOAT, {3, 5}),
                                    replaced("logits bfloat16", &Call::logits, ACL_BF16, {3, 5}),
                                    replaced("input of 3 dimensions", &Call::input, ACL_FLOAT16, {3, 4, 1}),
                                    replaced("weight of 3 dimensions", &Call::weight, ACL_FLOAT16, {5, 4, 1}),
                                    replaced("target of 2 dimensions", &Call::target, ACL_INT32, {3, 1}),
                                    replaced("max of 2 dimensions", &Call::max, ACL_FLOAT, {3, 1}),
                                    replaced("sum of 2 dimensions", &Call::sum, ACL_FLOAT, {3, 1}),
                                    replaced("predicted of 2 dimensions", &Call::predicted, ACL_FLOAT, {3, 1}),
                                    replaced("mask of 2 dimensions", &Call::mask, ACL_UINT8, {1, 1}),
                                    replaced("maskedTarget of 2 dimensions", &Call::masked_target, ACL_INT32, {3, 1}),
                                    replaced("logits of 3 dimensions", &Call::logits, ACL_FLOAT16, {3, 5, 1}),
                                    replaced("weight of no rows", &Call::weight, ACL_FLOAT16, {0, 4}),
                                    replaced("weight of another width", &Call::weight, ACL_FLOAT16, {5, 3}),
                                    replaced("target of another length", &Call::target, ACL_INT32, {1}),
                                    replaced("max of another length", &Call::max, ACL_FLOAT, {1}),
                                    replaced("sum of another length", &Call::sum, ACL_FLOAT, {1}),
                                    replaced("predicted of another length", &Call::predicted, ACL_FLOAT, {1}),
                                    replaced("mask too long", &Call::mask, ACL_UINT8, {2}),
                                    replaced("maskedTarget of another length", &Call::masked_target, ACL_INT32, {1}),
                                    replaced("logits of another width", &Call::logits, ACL_FLOAT16, {3, 4}),
                                    {"start -1", [](auto& call) { call.start = -1; }, 161002},
                                    {"end before start",
                                     [](auto& call) {
                                         call.start = 10;
                                         call.end = 9;
                                     },
                                     161002},
                                    {"H 65535",
                                     [](auto& call) {
                                         call.input = {ACL_FLOAT16, {3, 65535}};
                                         call.weight = {ACL_FLOAT16, {5, 65535}};
                                     },
                                     161002},
                                });
                            }};

const Case accepted_max_sum{"fused_linear_online_max_sum/accepted", [] {
                                check_rows<OnlineMaxSum>({
                                    {"H 65534",
                                     [](auto& call) {
                                         call.input = {ACL_FLOAT16, {3, 65534}};
                                         call.weight = {ACL_FLOAT16, {5, 65534}};
                                     }},
                                    {"end beyond the shard", [](auto& call) { call.end = 128; }},
                                    {"int64",
                                     [](auto& call) {
                                         call.target = {ACL_INT64, {3}};
                                         call.masked_target = {ACL_INT64, {3}};
                                     }},
                                    {"bfloat16, no logits",
                                     [](auto& call) {
                                         call.input = {ACL_BF16, {3, 4}};
                                         call.weight = {ACL_BF16, {5, 4}};
                                         call.logits = {};
                                     }},
                                });
                            }};

const Case formats_max_sum{
    "fused_linear_online_max_sum/formats", [] {
        using Call = OnlineMaxSum;
        const View nchw{.format = ACL_FORMAT_NCHW};
        const auto make_outputs_nchw = [=](Call& call) {
            for (auto* tensor : {&call.max, &call.sum, &call.predicted}) *tensor = {ACL_FLOAT, {3}, {0}, nchw};
            call.mask = {ACL_UINT8, {1}, {0}, nchw};
            call.masked_target = {ACL_INT32, {3}, {0}, nchw};
        };
        // A result of the format ND fits any output, another one an output of its own format.
        check_rows<Call>(Rows{
            {"target NCHW, outputs ND", [=](Call& call) { call.target = {ACL_INT32, {3}, {1}, nchw}; }, 561103},
            {"target ND, outputs NCHW", make_outputs_nchw},
            {"target and outputs NCHW",
             [=](Call& call) {
                 call.target = {ACL_INT32, {3}, {1}, nchw};
                 make_outputs_nchw(call);
             }},
            {"input NCHW, logits ND", [=](Call& call) { call.input = {ACL_FLOAT16, {3, 4}, {1}, nchw}; }, 561103},
            {"input NCHW, no logits",
             [=](Call& call) {
                 call.input = {ACL_FLOAT16, {3, 4}, {1}, nchw};
                 call.logits = {};
             }},
            {"input and logits NCHW",
             [=](Call& call) {
                 call.input = {ACL_FLOAT16, {3, 4}, {1}, nchw};
                 call.logits = {ACL_FLOAT16, {3, 5}, {0}, nchw};
             }},
        });
    }};

const Case workspace_max_sum{"fused_linear_online_max_sum/workspace_counts_the_cores_with_work", [] {
                                 const auto workspace = [](std::int64_t rows, std::int64_t columns) {
                                     OnlineMaxSum call;
                                     call.input = {ACL_FLOAT16, {rows, 4}};
                                     call.weight = {ACL_FLOAT16, {columns, 4}};
                                     call.target = {ACL_INT32, {rows}};
                                     for (auto* tensor : {&call.max, &call.sum, &call.predicted}) {
                                         *tensor = floats({rows});
                                     }
                                     call.mask = {ACL_UINT8, {(rows + 7) / 8}};
                                     call.masked_target = {ACL_INT32, {rows}};
                                     call.logits = {};
                                     const auto phase = phase_one(call);
                                     expect_equal(phase.status, 0, "the status");
                                     aclDestroyAclOpExecutor(phase.executor);
                                     return phase.workspace_size;
                                 };
                                 // CANN's allocator adds 32 bytes, and rounds up to 512.
                                 const auto padded = [](std::uint64_t own) {
                                     return ((16 << 20) + own + 32 + 511) / 512 * 512;
                                 };
                                 constexpr std::uint64_t tile = 128 * 256 * 2 * 2;
                                 expect_equal(workspace(3, 5), 16908800u, "for 3 rows and 5 columns");
                                 expect_equal(workspace(129, 257), padded(4 * (129 * 8 + tile)), "for 4 cores");
                                 expect_equal(workspace(129, 9999), padded(24 * (129 * 8 + tile)), "for all cores");
                             }};

const Case no_rows{"fused_linear_online_max_sum/no_rows", [] {
                       OnlineMaxSum call;
                       call.input = {ACL_FLOAT16, {0, 4}};
                       call.target = {ACL_INT32, {0}};
                       for (auto* tensor : {&call.max, &call.sum, &call.predicted}) *tensor = floats({0});
                       call.mask = {ACL_UINT8, {0}};
                       call.masked_target = {ACL_INT32, {0}};
                       call.logits = {};
                       const auto phase = phase_one(call);
                       expect_equal(phase.workspace_size, 0u, "workspaceSize");
                       expect_equal(launch(call, phase), 0, "the synchronisation's status");
                   }};

const Case no_columns{"fused_linear_online_max_sum/inner_size_0", [] {
                          OnlineMaxSum call;
                          call.input = {ACL_FLOAT16, {3, 0}};
                          call.weight = {ACL_FLOAT16, {5, 0}};
                          call.logits = {ACL_FLOAT16, {3, 5}, {7}};
                          run(call);
                          expect_close(call.max.values(), {0, 0, 0}, 0, "max");
                          expect_close(call.sum.values(), {5, 5, 5}, 0, "sum");
                          expect_close(call.predicted.values(), {0, 0, 0}, 0, "predicted");
                          expect_close(call.logits.values(), std::vector<double>(15, 0), 0, "logits");
                      }};

// Phase one of these two does not look at what the launch says.
template <class Call>
void fails_in_phase_two(Call& call, aclnnStatus status) {
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "phase one's status");
    const Memory workspace(phase.workspace_size);
    expect_equal(call.phase_two(workspace.address(), phase.workspace_size, phase.executor, nullptr), status,
                 "phase two's status");
    expect(recent_error().has_value(), "no message");
}

const Case no_kernel{"fused_linear_online_max_sum/no_kernel",
                     [] {
                         OnlineMaxSum call;
                         fails_in_phase_two(call, 561003);
                     },
                     {"Ascend910", "Ascend310P", "Ascend950"}};

const Case no_kernel_of_loss{"fused_cross_entropy_loss_with_max_sum/no_kernel",
                             [] {
                                 LossWithMaxSum call;
                                 fails_in_phase_two(call, 561003);
                             },
                             {"Ascend910", "Ascend310P"}};

const Case no_rows_of_loss{"fused_cross_entropy_loss_with_max_sum/no_rows", [] {
                               LossWithMaxSum call;
                               for (auto* tensor : {&call.max, &call.sum, &call.predicted, &call.loss}) {
                                   *tensor = floats({0});
                               }
                               call.logits = {};
                               call.softmax = {};
                               fails_in_phase_two(call, 561002);
                           }};

template <bool fails>
void no_rows_but_logits() {
    LossWithMaxSum call;
    for (auto* tensor : {&call.max, &call.sum, &call.predicted, &call.loss}) *tensor = floats({0});
    call.logits = floats({0, 4});
    call.softmax = floats({0, 4});
    fails ? fails_in_phase_two(call, 561002) : run(call);
}

const Case no_rows_but_logits_of_loss{"fused_cross_entropy_loss_with_max_sum/no_rows_but_logits",
                                      no_rows_but_logits<false>,
                                      {"Ascend910B", "Ascend910_93"}};
const Case no_rows_but_logits_on_950{
    "fused_cross_entropy_loss_with_max_sum/no_rows_but_logits_on_950", no_rows_but_logits<true>, {"Ascend950"}};

void give_logits_of(LossWithMaxSum& call, const Shape& shape) {
    call.max = floats({3}, {0.5});
    call.sum = floats({3}, {2});
    call.predicted = floats({3}, {0.25});
    call.loss = floats({3}, {7});
    call.logits = floats(shape, {1});
    call.softmax = floats(shape);
}

const Case fewer_logits{"fused_cross_entropy_loss_with_max_sum/as_many_losses_as_logits",
                        [] {
                            LossWithMaxSum call;
                            give_logits_of(call, {2, 2});
                            run(call);
                            const double loss = std::log(2.0) - 0.25;
                            expect_close(call.loss.values(), {loss, loss, 7}, 1e-6, "loss");
                        },
                        {"Ascend910B", "Ascend910_93"}};

const Case logits_on_950{"fused_cross_entropy_loss_with_max_sum/logits_that_do_not_fit_on_950",
                         [] {
                             for (const Shape& shape : {Shape{3, 0}, Shape{2, 2}, Shape{4, 2}}) {
                                 LossWithMaxSum call;
                                 give_logits_of(call, shape);
                                 fails_in_phase_two(call, 561002);
                             }
                         },
                         {"Ascend950"}};

const Case refusals_loss{
    "fused_cross_entropy_loss_with_max_sum/refusals", [] {
        check_rows<LossWithMaxSum>({
            {"no logitsMax", [](auto& call) { call.max = {}; }, 161001},
            {"no sumExpLogits", [](auto& call) { call.sum = {}; }, 161001},
            {"no predictedLogits", [](auto& call) { call.predicted = {}; }, 161001},
            {"no lossOut", [](auto& call) { call.loss = {}; }, 161001},
            {"logits without softMaxOut", [](auto& call) { call.softmax = {}; }, 161001},
            {"neither logits nor softMaxOut",
             [](auto& call) {
                 call.logits = {};
                 call.softmax = {};
             }},
            {"no input, no weight",
             [](auto& call) {
                 call.input = {};
                 call.weight = {};
             }},
            {"max float16", [](auto& call) { call.max = {ACL_FLOAT16, {2}}; }, 161002},
            {"sum float16", [](auto& call) { call.sum = {ACL_FLOAT16, {2}}; }, 161002},
            {"predicted float16", [](auto& call) { call.predicted = {ACL_FLOAT16, {2}}; }, 161002},
            {"loss float16", [](auto& call) { call.loss = {ACL_FLOAT16, {2}}; }, 161002},
            {"logits int32", [](auto& call) { call.logits = {ACL_INT32, {2, 2}}; }, 161002},
            {"logits float16", [](auto& call) { call.logits = {ACL_FLOAT16, {2, 2}}; }},
            {"logits bfloat16", [](auto& call) { call.logits = {ACL_BF16, {2, 2}}; }},
            {"softmax float16", [](auto& call) { call.softmax = {ACL_FLOAT16, {2, 2}}; }, 161002},
            {"max of 2 dimensions", [](auto& call) { call.max = floats({2, 1}); }, 161002},
            {"sum of another length", [](auto& call) { call.sum = floats({3}); }, 161002},
            {"predicted of another length", [](auto& call) { call.predicted = floats({3}); }, 161002},
            {"loss of another length", [](auto& call) { call.loss = floats({3}); }, 161002},
            {"logits of 1 dimension", [](auto& call) { call.logits = floats({2}); }, 161002},
            {"softmax of another shape", [](auto& call) { call.softmax = floats({2, 3}); }, 161002},
            {"labelSmoothing 0.25", [](auto& call) { call.label_smoothing = 0.25f; }, 161002},
        });
    }};

}  // namespace
