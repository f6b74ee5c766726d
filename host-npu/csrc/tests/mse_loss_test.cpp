// What aclnnMseLoss and aclnnMseLossBackward accept and refuse.
#include "tests/calls.h"

namespace {

using namespace test;

const Shape kNineDims{1, 1, 1, 1, 1, 1, 1, 1, 4};

const Case null_results{"mse_loss_backward/null_results", [] { check_null_results<MseLossBackward>(); }};
const Case null_results_forward{"mse_loss/null_results", [] { check_null_results<MseLoss>(); }};

const Case refusals{"mse_loss_backward/refusals", [] {
                        check_rows<MseLossBackward>({
                            {"no gradOutput", [](auto& call) { call.grad = {}; }, 161001},
                            {"no self", [](auto& call) { call.self = {}; }, 161001},
                            {"no target", [](auto& call) { call.target = {}; }, 161001},
                            {"no out", [](auto& call) { call.out = {}; }, 161001},
                            {"gradOutput int32", [](auto& call) { call.grad = {ACL_INT32, {2, 2}}; }, 161002},
                            {"self int32", [](auto& call) { call.self = {ACL_INT32, {2, 2}}; }, 161002},
                            {"target of another type", [](auto& call) { call.target = {ACL_FLOAT16, {2, 2}}; }, 161002},
                            {"out int32", [](auto& call) { call.out = {ACL_INT32, {2, 2}}; }, 161002},
                            {"all int32",
                             [](auto& call) {
                                 call.grad = {ACL_INT32, {2, 2}};
                                 call.self = {ACL_INT32, {2, 2}};
                                 call.target = {ACL_INT32, {2, 2}};
                                 call.out = {ACL_INT32, {2, 2}};
                             },
                             161002},
                            {"reduction 3", [](auto& call) { call.reduction = 3; }, 161002},
                            {"reduction -1", [](auto& call) { call.reduction = -1; }, 161002},
                            {"gradOutput of 9 dimensions", [](auto& call) { call.grad = floats(kNineDims); }, 161002},
                            {"self of 9 dimensions", [](auto& call) { call.self = floats(kNineDims); }, 161002},
                            {"target of 9 dimensions", [](auto& call) { call.target = floats(kNineDims); }, 161002},
                            {"all of 9 dimensions",
                             [](auto& call) {
                                 for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out})
                                     *tensor = floats(kNineDims);
                             },
                             161002},
                            {"self does not broadcast", [](auto& call) { call.self = floats({3, 2}); }, 161002},
                            {"target does not broadcast", [](auto& call) { call.target = floats({2, 3}); }, 161002},
                            {"an empty dimension against 2", [](auto& call) { call.target = floats({0, 2}); }, 161002},
                            {"out of another shape", [](auto& call) { call.out = floats({2, 1}); }, 161002},
                            {"out of another rank", [](auto& call) { call.out = floats({4}); }, 161002},
                        });
                    }};

// The type is looked at before the reduction, the reduction before the shapes.
const Case order{"mse_loss_backward/order_of_checks", [] {
                     const auto message = [](const std::function<void(MseLossBackward&)>& change) {
                         MseLossBackward call;
                         change(call);
                         phase_one(call);
                         return recent_error().value_or("");
                     };
                     const auto both = message([](MseLossBackward& call) {
                         call.target = {ACL_FLOAT16, {2, 3}};
                         call.reduction = 3;
                     });
                     expect(both.find("float16") != std::string::npos, "not the type: ", both);
                     const auto shape = message([](MseLossBackward& call) {
                         call.target = floats({2, 3});
                         call.reduction = 3;
                     });
                     expect(shape.find("reduction") != std::string::npos, "not the reduction: ", shape);
                 }};

const Case accepted{"mse_loss_backward/accepted", [] {
                        check_rows<MseLossBackward>({
                            {"broadcasting",
                             [](auto& call) {
                                 call.grad = floats({2, 2, 3, 2});
                                 call.self = floats({1, 2, 3, 2});
                                 call.target = floats({2, 2, 1, 2});
                                 call.out = floats({2, 2, 3, 2});
                                 call.reduction = 0;
                             }},
                            {"float16, mean, broadcasting",
                             [](auto& call) {
                                 call.grad = {ACL_FLOAT16, {}};
                                 call.self = {ACL_FLOAT16, {2, 1}};
                                 call.target = {ACL_FLOAT16, {2}};
                                 call.out = {ACL_FLOAT16, {2, 2}};
                             }},
                            {"float32 to float16", [](auto& call) { call.out = {ACL_FLOAT16, {2, 2}}; }},
                            {"scalars",
                             [](auto& call) {
                                 for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out})
                                     *tensor = floats({});
                             }},
                            {"mixed formats",
                             [](auto& call) {
                                 call.self = {ACL_FLOAT, {1, 1, 2, 2}, {1}, {.format = ACL_FORMAT_HWCN}};
                                 call.target = {ACL_FLOAT, {1, 1, 1, 2, 2}, {1}, {.format = ACL_FORMAT_NDHWC}};
                                 call.out = floats({1, 1, 1, 2, 2});
                             }},
                        });
                    }};

const Case empty{"mse_loss_backward/empty_leaves_out_untouched", [] {
                     for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                         MseLossBackward call;
                         call.reduction = reduction;
                         call.self = floats({0, 2});
                         call.target = floats({1, 2});
                         call.grad = floats({});
                         // The storage has elements, the view has none.
                         call.out = {ACL_FLOAT, {0, 2}, {7}, {.storage = Shape{4}}};
                         const auto phase = phase_one(call);
                         expect_equal(phase.status, 0, "the status");
                         expect_equal(phase.workspace_size, 0u, "workspaceSize");
                         expect_equal(launch(call, phase), 0, "the synchronisation's status");
                         expect_close(call.out.values(), {7, 7, 7, 7}, 0, "out's storage");
                     }
                 }};

template <bool accepts>
void bfloat16() {
    check_rows<MseLossBackward>(
        {{"bfloat16",
          [](auto& call) {
              for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) {
                  *tensor = {ACL_BF16, {2, 2}};
              }
          },
          accepts ? 0 : 161002},
         {"out bfloat16", [](auto& call) { call.out = {ACL_BF16, {2, 2}}; }, accepts ? 0 : 161002},
         {"float16", [](auto& call) {
              for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) {
                  *tensor = {ACL_FLOAT16, {2, 2}};
              }
          }}});
}

const Case bfloat16_accepted{
    "mse_loss_backward/bfloat16_accepted", bfloat16<true>, {"Ascend910B", "Ascend910_93", "Ascend950"}};
const Case bfloat16_refused{"mse_loss_backward/bfloat16_refused", bfloat16<false>, {"Ascend910", "Ascend310P"}};

const Case refusals_forward{"mse_loss/refusals", [] {
                                check_rows<MseLoss>({
                                    {"no self", [](auto& call) { call.self = {}; }, 161001},
                                    {"no target", [](auto& call) { call.target = {}; }, 161001},
                                    {"no out", [](auto& call) { call.out = {}; }, 161001},
                                    {"self int32", [](auto& call) { call.self = {ACL_INT32, {2, 2}}; }, 161002},
                                    {"target int16", [](auto& call) { call.target = {ACL_INT16, {2, 2}}; }, 161002},
                                    {"out int32", [](auto& call) { call.out = {ACL_INT32, {}}; }, 161002},
                                    {"reduction 3", [](auto& call) { call.reduction = 3; }, 161002},
                                    {"self of 9 dimensions", [](auto& call) { call.self = floats(kNineDims); }, 161002},
                                    {"does not broadcast", [](auto& call) { call.target = floats({3, 2}); }, 161002},
                                    {"out of one dimension", [](auto& call) { call.out = floats({1}); }, 161002},
                                    {"out of two elements", [](auto& call) { call.out = floats({2}); }, 161002},
                                    {"out of the wrong shape",
                                     [](auto& call) {
                                         call.reduction = 0;
                                         call.out = floats({4});
                                     },
                                     161002},
                                    {"mixed types", [](auto& call) { call.target = {ACL_FLOAT16, {2, 2}, {1}}; }},
                                    {"broadcasting",
                                     [](auto& call) {
                                         call.reduction = 0;
                                         call.target = floats({3, 1, 2});
                                         call.out = floats({3, 2, 2});
                                     }},
                                });
                            }};

const Case workspace_forward{"mse_loss/workspace_depends_on_the_format_and_the_reduction", [] {
                                 const auto workspace = [](aclFormat format, std::int64_t reduction = 1) {
                                     MseLoss call;
                                     call.reduction = reduction;
                                     if (reduction == 0) call.out = floats({2, 2});
                                     for (auto* tensor : {&call.self, &call.target}) {
                                         *tensor = {ACL_FLOAT, {2, 2}, {1}, {.format = format}};
                                     }
                                     const auto phase = phase_one(call);
                                     aclDestroyAclOpExecutor(phase.executor);
                                     return phase.workspace_size;
                                 };
                                 constexpr std::uint64_t library = 16 << 20;
                                 expect(workspace(ACL_FORMAT_ND) >= library, "too little for ND");
                                 expect(workspace(ACL_FORMAT_NCL) >= library, "too little for NCL");
                                 expect(workspace(ACL_FORMAT_NCHW) < library, "the kernel does not take NCHW");
                                 expect_equal(workspace(ACL_FORMAT_ND, 0), 0u, "without a reduction");
                             }};

const Case empty_forward{"mse_loss/empty", [] {
                             const double results[] = {7, NAN, 0};
                             for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                                 MseLoss call;
                                 call.reduction = reduction;
                                 call.self = floats({0, 2});
                                 call.target = floats({0, 2});
                                 call.out = {
                                     ACL_FLOAT, reduction == 0 ? Shape{0, 2} : Shape{}, {7}, {.storage = Shape{1}}};
                                 run(call);
                                 expect_close(call.out.values(), {results[reduction]}, 0, "out");
                             }
                         }};

}  // namespace
