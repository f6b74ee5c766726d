// What aclnnMseLoss, aclnnMseLossOut and aclnnMseLossBackward do; tests/phase_one has what they refuse.
#include "tests/calls.h"

namespace {

using namespace test;

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

// The mean or sum over the first dimension.
const Case results_out{"mse_loss_out/results", [] {
                           MseLossOut mean;
                           run(mean);
                           expect_close(mean.out.values(), {1, 2}, 0, "the means");
                           MseLossOut sum;
                           sum.reduction = 2;
                           run(sum);
                           expect_close(sum.out.values(), {2, 4}, 0, "the sums");
                           MseLossOut none;
                           none.reduction = 0;
                           none.out = floats({2, 2});
                           run(none);
                           expect_close(none.out.values(), {1, 0, 1, 4}, 0, "the losses");
                           MseLossOut broadcast;
                           broadcast.target = floats({3, 1, 2}, {0, 1, 2, 3, 4, 5});
                           broadcast.reduction = 2;
                           broadcast.out = floats({2, 2});
                           run(broadcast);
                           expect_close(broadcast.out.values(), {20, 20, 8, 8}, 0, "the broadcast sums");
                           MseLossOut vector;
                           vector.self = floats({4}, {0, 1, 2, 3});
                           vector.target = floats({1}, {1});
                           vector.out = floats({});
                           run(vector);
                           expect_close(vector.out.values(), {1.5}, 0, "the mean of a vector");
                       }};

const Case empty_out{"mse_loss_out/empty_leaves_out_untouched", [] {
                         MseLossOut call;
                         call.self = floats({0, 2});
                         call.target = floats({0, 2});
                         call.out = floats({2}, {7});
                         const auto phase = phase_one(call);
                         expect_equal(phase.workspace_size, 0u, "workspaceSize");
                         expect_equal(launch(call, phase), 0, "the synchronisation's status");
                         expect_close(call.out.values(), {7, 7}, 0, "out");
                     }};

}  // namespace
