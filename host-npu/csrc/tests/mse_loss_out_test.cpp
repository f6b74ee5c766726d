// aclnnMseLossOut: the loss of each element, or its mean or sum over the first dimension.
#include "tests/calls.h"

namespace {

using namespace test;

const Case null_results{"mse_loss_out/null_results", [] { check_null_results<MseLossOut>(); }};

const Case refusals{"mse_loss_out/refusals", [] {
                        check_rows<MseLossOut>({
                            {"no self", [](auto& call) { call.self = {}; }, 161001},
                            {"no target", [](auto& call) { call.target = {}; }, 161001},
                            {"no out", [](auto& call) { call.out = {}; }, 161001},
                            {"self int32", [](auto& call) { call.self = {ACL_INT32, {2, 2}}; }, 161002},
                            {"out int32", [](auto& call) { call.out = {ACL_INT32, {2}}; }, 161002},
                            {"reduction 3", [](auto& call) { call.reduction = 3; }, 161002},
                            {"does not broadcast", [](auto& call) { call.target = floats({3, 2}); }, 161002},
                            {"mean to a scalar", [](auto& call) { call.out = floats({}); }, 161002},
                            {"mean of all dimensions", [](auto& call) { call.out = floats({2, 2}); }, 161002},
                            {"none of one dimension", [](auto& call) { call.reduction = 0; }, 161002},
                            {"float16 and float32", [](auto& call) { call.target = {ACL_FLOAT16, {2, 2}, {1}}; }},
                            {"float16 out", [](auto& call) { call.out = {ACL_FLOAT16, {2}}; }},
                        });
                    }};

const Case results{"mse_loss_out/results", [] {
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

const Case empty{"mse_loss_out/empty_leaves_out_untouched", [] {
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
