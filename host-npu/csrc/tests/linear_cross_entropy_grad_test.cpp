// What aclnnFusedLinearCrossEntropyLossGrad accepts and refuses, in its two modes.
#include "tests/calls.h"

namespace {

using namespace test;

// Refusals of both modes.
template <class Call>
std::vector<Row<Call>> common_rows() {
    const auto replaced = [](const char* name, Tensor LossGrad::* member, aclDataType dtype, const Shape& shape) {
        return Row<Call>{name, [=](Call& call) { call.*member = {dtype, shape}; }, 161002};
    };
    const auto absent = [](const char* name, Tensor LossGrad::* member) {
        return Row<Call>{name, [=](Call& call) { call.*member = {}; }, 161001};
    };
    return {
        absent("no grad", &LossGrad::grad),
        absent("no input", &LossGrad::input),
        absent("no weight", &LossGrad::weight),
        absent("no targetMask", &LossGrad::mask),
        absent("no maskedTarget", &LossGrad::masked_target),
        absent("no inputGradOut", &LossGrad::input_grad),
        absent("no weightGradOut", &LossGrad::weight_grad),
        replaced("grad bfloat16", &LossGrad::grad, ACL_BF16, {3}),
        replaced("input float32", &LossGrad::input, ACL_FLOAT, {3, 4}),
        replaced("weight float32", &LossGrad::weight, ACL_FLOAT, {130, 4}),
        replaced("weight of the other type", &LossGrad::weight, ACL_FLOAT16, {130, 4}),
        replaced("mask int8", &LossGrad::mask, ACL_INT8, {3}),
        replaced("maskedTarget float32", &LossGrad::masked_target, ACL_FLOAT, {3}),
        replaced("inputGradOut of the other type", &LossGrad::input_grad, ACL_FLOAT16, {3, 4}),
        replaced("weightGradOut of the other type", &LossGrad::weight_grad, ACL_FLOAT16, {130, 4}),
        replaced("grad of 2 dimensions", &LossGrad::grad, ACL_FLOAT, {3, 1}),
        replaced("input of 3 dimensions", &LossGrad::input, ACL_BF16, {3, 4, 1}),
        replaced("weight of 1 dimension", &LossGrad::weight, ACL_BF16, {520}),
        replaced("mask of 2 dimensions", &LossGrad::mask, ACL_BOOL, {3, 1}),
        replaced("maskedTarget of 2 dimensions", &LossGrad::masked_target, ACL_INT32, {3, 1}),
        replaced("inputGradOut of 1 dimension", &LossGrad::input_grad, ACL_BF16, {12}),
        replaced("weightGradOut of 1 dimension", &LossGrad::weight_grad, ACL_BF16, {520}),
        replaced("input of other rows", &LossGrad::input, ACL_BF16, {4, 4}),
        replaced("weight of another width", &LossGrad::weight, ACL_BF16, {130, 5}),
        replaced("bool mask too long", &LossGrad::mask, ACL_BOOL, {4}),
        replaced("bit mask too short", &LossGrad::mask, ACL_UINT8, {0}),
        replaced("maskedTarget of another length", &LossGrad::masked_target, ACL_INT32, {4}),
        replaced("inputGradOut of another shape", &LossGrad::input_grad, ACL_BF16, {4, 3}),
        replaced("weightGradOut of another shape", &LossGrad::weight_grad, ACL_BF16, {4, 130}),
        {"input in another format",
         [](auto& call) { call.input = {ACL_BF16, {3, 4}, {0}, {.format = ACL_FORMAT_NCHW}}; }, 161002},
        {"weightGradOut in another format",
         [](auto& call) { call.weight_grad = {ACL_BF16, {130, 4}, {0}, {.format = ACL_FORMAT_FRACTAL_NZ}}; }, 161002},
        {"labelSmoothing 1", [](auto& call) { call.label_smoothing = 1.0f; }, 161002},
        {"bit mask longer than needed", [](auto& call) { call.mask = {ACL_UINT8, {5}}; }},
        {"int64 targets", [](auto& call) { call.masked_target = {ACL_INT64, {3}}; }},
    };
}

const Case refusals{
    "fused_linear_cross_entropy_loss_grad/refusals", [] {
        auto rows = common_rows<LossGrad>();
        rows.push_back({"no softmax, no max, no sum", [](auto& call) { call.softmax = {}; }, 161001});
        rows.push_back({"softmax bfloat16", [](auto& call) { call.softmax = {ACL_BF16, {3, 130}}; }, 161002});
        rows.push_back({"softmax of 1 dimension", [](auto& call) { call.softmax = floats({390}); }, 161002});
        rows.push_back({"softmax of another shape", [](auto& call) { call.softmax = floats({3, 131}); }, 161002});
        rows.push_back({"V 127",
                        [](auto& call) {
                            call.weight = {ACL_BF16, {127, 4}};
                            call.weight_grad = {ACL_BF16, {127, 4}};
                            call.softmax = floats({3, 127});
                        },
                        161002});
        rows.push_back({"max is ignored beside a softmax", [](auto& call) { call.max = floats({9, 9}); }});
        check_rows(rows);
    }};

const Case refusals_from_statistics{
    "fused_linear_cross_entropy_loss_grad/refusals_without_softmax", [] {
        auto rows = common_rows<LossGradFromStatistics>();
        rows.push_back({"no max", [](auto& call) { call.max = {}; }, 161001});
        rows.push_back({"no sum", [](auto& call) { call.sum = {}; }, 161001});
        rows.push_back({"max float16", [](auto& call) { call.max = {ACL_FLOAT16, {3}}; }, 161002});
        rows.push_back({"sum float16", [](auto& call) { call.sum = {ACL_FLOAT16, {3}}; }, 161002});
        rows.push_back({"max of 2 dimensions", [](auto& call) { call.max = floats({3, 1}); }, 161002});
        rows.push_back({"sum of another length", [](auto& call) { call.sum = floats({2}, {1}); }, 161002});
        rows.push_back({"V 1", [](auto& call) {
                            call.weight = {ACL_BF16, {1, 4}};
                            call.weight_grad = {ACL_BF16, {1, 4}};
                        }});
        check_rows(rows);
    }};

// A missing softmax comes before any other missing argument, the types before labelSmoothing, that before the shapes.
const Case order{"fused_linear_cross_entropy_loss_grad/order_of_checks", [] {
                     LossGrad call;
                     call.softmax = {};
                     call.grad = {};
                     phase_one(call);
                     const auto missing = recent_error().value_or("");
                     expect(missing.find("softmax") != std::string::npos, "not the softmax: ", missing);
                     LossGrad both;
                     both.label_smoothing = 1;
                     both.input = {ACL_BF16, {4, 4}};
                     phase_one(both);
                     const auto smoothing = recent_error().value_or("");
                     expect(smoothing.find("labelSmoothing") != std::string::npos, "not labelSmoothing: ", smoothing);
                 }};

// The status of phase one with these sizes and a softmax, or with max and sum instead.
aclnnStatus status_of(std::int64_t rows, std::int64_t hidden, std::int64_t vocabulary, bool with_softmax) {
    LossGrad call;
    call.grad = floats({rows});
    // All in one element: phase one does not look at storage.
    const View one{.strides = Shape{0, 0}, .storage = Shape{1}};
    const Shape by_row{rows, hidden}, by_word{vocabulary, hidden};
    call.input = {ACL_BF16, by_row, {0}, one};
    call.weight = {ACL_BF16, by_word, {0}, one};
    call.mask = {ACL_BOOL, {rows}};
    call.masked_target = {ACL_INT32, {rows}};
    call.softmax = {};
    if (with_softmax) {
        call.softmax = {ACL_FLOAT, {rows, vocabulary}, {0}, one};
    } else {
        call.max = floats({rows});
        call.sum = floats({rows}, {1});
    }
    call.input_grad = {ACL_BF16, by_row, {0}, one};
    call.weight_grad = {ACL_BF16, by_word, {0}, one};
    const auto phase = phase_one(call);
    const auto error = recent_error();
    expect_equal(error.has_value(), phase.status != 0, "whether there is a message");
    if (phase.status == 0) {
        expect(phase.workspace_size > 16u << 20, "workspaceSize is ", phase.workspace_size);
        aclDestroyAclOpExecutor(phase.executor);
    }
    return phase.status;
}

const Case limits{"fused_linear_cross_entropy_loss_grad/limits_with_softmax", [] {
                      expect_equal(status_of(8192, 4096, 19392, true), 0, "BT 8192, H 4096, V 19392");
                      expect_equal(status_of(32768, 4096, 19392, true), 0, "BT 32768");
                      expect_equal(status_of(65536, 64, 128, true), 0, "BT 65536");
                      expect_equal(status_of(65537, 64, 128, true), 561103, "BT 65537");
                      expect_equal(status_of(77568, 64, 128, true), 561103, "BT 77568");
                      expect_equal(status_of(8, 65535, 128, true), 0, "H 65535");
                      expect_equal(status_of(8, 65536, 128, true), 561103, "H 65536");
                      expect_equal(status_of(8, 77568, 128, true), 561103, "H 77568");
                      expect_equal(status_of(8, 64, 24560, true), 0, "V 24560");
                      expect_equal(status_of(8, 64, 24561, true), 561103, "V 24561");
                      expect_equal(status_of(8, 64, 32768, true), 561103, "V 32768");
                      expect_equal(status_of(8, 64, 77568, true), 561103, "V 77568");
                      expect_equal(status_of(8, 64, 100, true), 161002, "V 100");
                  }};

const Case limits_from_statistics{"fused_linear_cross_entropy_loss_grad/limits_without_softmax", [] {
                                      expect_equal(status_of(77568, 64, 128, false), 0, "BT 77568");
                                      expect_equal(status_of(8, 65535, 128, false), 0, "H 65535");
                                      expect_equal(status_of(8, 65536, 128, false), 561103, "H 65536");
                                      expect_equal(status_of(8, 64, 151936, false), 0, "V 151936");
                                      expect_equal(status_of(8, 64, 1, false), 0, "V 1");
                                  }};

// Many rows change the tiling for the rest of the process.
// The tiling sets its sizes before it looks at them, for all calls of the process.
template <std::int64_t many, aclnnStatus status>
void workspace_history() {
    const auto size = [](std::int64_t rows, aclnnStatus expected = 0) {
        LossGrad call;
        const View one{.strides = Shape{0, 0}, .storage = Shape{1}};
        call.grad = floats({rows});
        call.input = {ACL_BF16, {rows, 4}, {0}, one};
        call.mask = {ACL_BOOL, {rows}};
        call.masked_target = {ACL_INT32, {rows}};
        call.softmax = {ACL_FLOAT, {rows, 130}, {0}, one};
        call.input_grad = {ACL_BF16, {rows, 4}, {0}, one};
        const auto phase = phase_one(call);
        expect_equal(phase.status, expected, "the status");
        if (expected == 0) aclDestroyAclOpExecutor(phase.executor);
        recent_error();
        return phase.workspace_size;
    };
    const auto before = size(100);
    size(many, status);
    const auto after = size(101);
    expect(after != before, "the workspace stayed ", after, " bytes");
}

const Case accepted_history{"fused_linear_cross_entropy_loss_grad/workspace_depends_on_earlier_calls",
                            workspace_history<30000, 0>,
                            {"Ascend910_93"}};
const Case refused_history{"fused_linear_cross_entropy_loss_grad/workspace_depends_on_refused_calls",
                           workspace_history<65537, 561103>,
                           {"cache off"}};

template <class Call>
void empty() {
    Call call;
    call.grad = floats({0});
    call.input = {ACL_BF16, {0, 4}};
    call.mask = {ACL_BOOL, {0}};
    call.masked_target = {ACL_INT32, {0}};
    if (call.softmax != nullptr) {
        call.softmax = floats({0, 130});
    } else {
        call.max = floats({0});
        call.sum = floats({0});
    }
    call.input_grad = {ACL_BF16, {0, 4}};
    call.weight_grad = {ACL_BF16, {130, 4}, {7}};
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "the status");
    expect_equal(phase.workspace_size, 0u, "workspaceSize");
    expect_equal(launch(call, phase), 0, "the synchronisation's status");
    expect_close(call.weight_grad.values(), std::vector<double>(520, 7), 0, "weightGradOut");
}

const std::vector<std::string> kAllSocs{"Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950"};

const Case empty_with_softmax{"fused_linear_cross_entropy_loss_grad/empty_leaves_outputs_untouched", empty<LossGrad>,
                              kAllSocs};
const Case empty_without_softmax{"fused_linear_cross_entropy_loss_grad/empty_without_softmax",
                                 empty<LossGradFromStatistics>, kAllSocs};

const Case other_chips{"fused_linear_cross_entropy_loss_grad/unsupported_chip",
                       [] {
                           LossGrad call;
                           expect_equal(phase_one(call).status, 361001, "the status");
                           expect(recent_error().value_or("").find("EZ9903") != std::string::npos, "no EZ9903");
                           // Bad arguments are found before the chip.
                           LossGrad bad;
                           bad.label_smoothing = 1;
                           expect_equal(phase_one(bad).status, 161002, "the status of a bad argument");
                           recent_error();
                       },
                       {"Ascend910", "Ascend310P", "Ascend950"}};

}  // namespace
