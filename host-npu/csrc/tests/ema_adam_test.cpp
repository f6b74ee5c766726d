// aclnnApplyFusedEmaAdam, whose generated phase one differs from the others'.
#include "tests/calls.h"

namespace {

using namespace test;

// Phase one may write the executor before it refuses, so only the status counts.
struct Refused {
    const char* name;
    std::function<void(EmaAdam&)> change;
    aclnnStatus status;
};

void check(const std::vector<Refused>& rows) {
    for (const auto& row : rows) {
        EmaAdam call;
        row.change(call);
        expect_equal(phase_one(call).status, row.status, row.name, ": the status");
        expect(recent_error().has_value(), row.name, ": no message");
    }
    EmaAdam good;
    run(good);
}

Refused absent(const char* name, Tensor EmaAdam::* member) {
    return {name, [=](EmaAdam& call) { call.*member = {}; }, 161001};
}

Refused replaced(const char* name, Tensor EmaAdam::* member, aclDataType dtype, Shape shape, aclnnStatus status) {
    return {name, [=](EmaAdam& call) { call.*member = {dtype, shape}; }, status};
}

const Case refusals{"apply_fused_ema_adam/refusals", [] {
                        const auto in_format = [](int format) {
                            return [=](EmaAdam& call) {
                                call.var = {ACL_FLOAT, {2, 2, 2}, {1}, {.format = static_cast<aclFormat>(format)}};
                            };
                        };
                        check({
                            absent("no grad", &EmaAdam::grad),
                            absent("no varRef", &EmaAdam::var),
                            absent("no mRef", &EmaAdam::m),
                            absent("no vRef", &EmaAdam::v),
                            absent("no sRef", &EmaAdam::s),
                            absent("no step", &EmaAdam::step),
                            replaced("var float16", &EmaAdam::var, ACL_FLOAT16, {2, 2, 2}, 161002),
                            replaced("s bfloat16", &EmaAdam::s, ACL_BF16, {2, 2, 2}, 161002),
                            replaced("grad float64", &EmaAdam::grad, ACL_DOUBLE, {2, 2, 2}, 161002),
                            replaced("step int32", &EmaAdam::step, ACL_INT32, {1}, 161002),
                            replaced("step float32", &EmaAdam::step, ACL_FLOAT, {1}, 161002),
                            {"var in FRACTAL_NZ", in_format(ACL_FORMAT_FRACTAL_NZ), 161002},
                            {"var in HWCN", in_format(ACL_FORMAT_HWCN), 161002},
                            {"var in NDHWC", in_format(ACL_FORMAT_NDHWC), 161002},
                            {"var in NC", in_format(ACL_FORMAT_NC), 161002},
                            replaced("grad of another shape", &EmaAdam::grad, ACL_FLOAT, {8}, 561002),
                            replaced("var of another shape", &EmaAdam::var, ACL_FLOAT, {8}, 561002),
                            replaced("m of another shape", &EmaAdam::m, ACL_FLOAT, {2, 2, 1}, 561002),
                            replaced("v of another shape", &EmaAdam::v, ACL_FLOAT, {2, 2, 1}, 561002),
                            replaced("s of another shape", &EmaAdam::s, ACL_FLOAT, {2, 2, 1}, 561002),
                        });
                    }};

const Case null_results{"apply_fused_ema_adam/null_results", [] {
                            EmaAdam call;
                            std::uint64_t size = 7;
                            expect_equal(call.phase_one(&size, nullptr), 161001, "the status without executor");
                            expect(recent_error().has_value(), "no message");
                            // The tensors are looked at before the executor.
                            call.s = {};
                            call.phase_one(&size, nullptr);
                            const auto message = recent_error().value_or("");
                            expect(message.find("sRef") != std::string::npos, "not sRef: ", message);
                            // A null workspaceSize passes for a hit of the cache of arguments.
                            EmaAdam half;
                            aclOpExecutor* executor = nullptr;
                            expect_equal(half.phase_one(nullptr, &executor), 0, "the status without workspaceSize");
                            expect(executor != nullptr, "there is no executor");
                            expect(half.phase_two(nullptr, 0, executor, nullptr) != 0, "phase two accepted it");
                            recent_error();
                            expect_equal(aclDestroyAclOpExecutor(executor), 0, "aclDestroyAclOpExecutor's status");
                        }};

// These are the formats that pass for ND. The last has no name in the published headers.
const Case formats{"apply_fused_ema_adam/formats", [] {
                       constexpr int kDhwcn = 31;
                       for (const int format : {+ACL_FORMAT_ND, +ACL_FORMAT_NCL, +ACL_FORMAT_NCHW, +ACL_FORMAT_NHWC,
                                                +ACL_FORMAT_NCDHW, kDhwcn}) {
                           EmaAdam call;
                           call.m = {ACL_FLOAT, {2, 2, 2}, {1}, {.format = static_cast<aclFormat>(format)}};
                           run(call);
                       }
                   }};

// Copies are made before anything else is looked at, and made back of tensors whose format has a name.
const Case copies{
    "apply_fused_ema_adam/strided", [] {
        const View inside{.strides = Shape{8, 4, 2}, .storage = Shape{16}};
        const View outside{.strides = Shape{8, 4, 2}, .storage = Shape{8}};
        View nameless = inside;
        nameless.format = static_cast<aclFormat>(31);  // DHWCN
        const auto var = [](const View& view) {
            return [=](EmaAdam& call) { call.var = {ACL_FLOAT, {2, 2, 2}, {1}, view}; };
        };
        check({
            {"var outside of its storage", var(outside), 561103},
            {"grad outside of its storage", [=](EmaAdam& call) { call.grad = {ACL_DOUBLE, {2, 2, 2}, {1}, outside}; },
             561103},
            {"step outside of its storage",
             [=](EmaAdam& call) { call.step = {ACL_INT64, {2}, {1}, {.strides = Shape{2}, .storage = Shape{2}}}; },
             561103},
            {"var strided in DHWCN", var(nameless), 561103},
        });
        for (const auto member : {&EmaAdam::grad, &EmaAdam::var}) {
            EmaAdam call;
            call.*member = {ACL_FLOAT, {2, 2, 2}, {1}, member == &EmaAdam::grad ? nameless : inside};
            run(call);
        }
    }};

const Case dtypes{"apply_fused_ema_adam/dtypes",
                  [] {
                      for (const auto dtype : kFloatTypes) {
                          EmaAdam call;
                          for (auto* tensor : {&call.grad, &call.var, &call.m, &call.v, &call.s}) {
                              *tensor = {dtype, {300, 4, 2}, {1}};
                          }
                          // Only the first element of step is read, whatever its shape.
                          call.step = {ACL_INT64, {2, 8}, {3}};
                          run(call);
                      }
                  },
                  {"Ascend910B", "Ascend910_93", "Ascend950"}};

const Case no_kernel{"apply_fused_ema_adam/unsupported_chip",
                     [] {
                         // Nothing else is looked at before, so the executor is not written.
                         EmaAdam call;
                         call.grad = {ACL_DOUBLE, {1}};
                         const auto phase = phase_one(call);
                         expect_equal(phase.status, 161001, "the status");
                         expect(phase.executor == nullptr, "the executor was written");
                         expect(recent_error().has_value(), "no message");
                     },
                     {"Ascend910", "Ascend310P"}};

const Case refused_phase_two{
    "apply_fused_ema_adam/refused_phase_two_keeps_the_executor", [] {
        EmaAdam call;
        const auto phase = phase_one(call);
        expect_equal(phase.status, 0, "phase one's status");
        expect(phase.workspace_size >= 16u << 20, "workspaceSize is ", phase.workspace_size);
        const Memory workspace(phase.workspace_size);
        expect_equal(call.phase_two(nullptr, phase.workspace_size, phase.executor, nullptr), 161001,
                     "the status without workspace");
        expect_equal(call.phase_two(workspace.address(), phase.workspace_size - 1, phase.executor, nullptr), 161002,
                     "the status of a small workspace");
        expect_equal(call.phase_two(workspace.address(), phase.workspace_size, nullptr, nullptr), 161001,
                     "the status without executor");
        recent_error();
        expect_equal(launch(call, phase), 0, "the synchronisation's status");
        expect(call.var.values() != counting(8), "varRef did not change");
    }};

const Case empty{"apply_fused_ema_adam/empty_skips_the_launch", [] {
                     EmaAdam call;
                     for (auto* tensor : {&call.grad, &call.var, &call.m, &call.v, &call.s}) {
                         *tensor = floats({0, 3});
                     }
                     run(call);
                     // No output has an element, so the tiling that compares the shapes is not asked.
                     call.grad = floats({8});
                     run(call);
                 }};

const Case set_addresses{
    "apply_fused_ema_adam/index_selects_the_tensor", [] {
        EmaAdam call;
        const auto phase = phase_one(call);
        expect_equal(aclSetAclOpExecutorRepeatable(phase.executor), 0, "the status of repeatable");
        expect_equal(launch(call, phase), 0, "the first run's synchronisation");
        // Another parameter: varRef is input 1 and output 0.
        const auto other = floats({2, 2, 2}, {5});
        const auto before = call.var.values();
        expect_equal(aclSetInputTensorAddr(phase.executor, 1, call.var, other.address()), 0,
                     "aclSetInputTensorAddr's status");
        expect_equal(launch(call, phase), 0, "the second run's synchronisation");
        expect_close(call.var.values(), before, 0, "the first varRef");
        expect(other.values() != std::vector<double>(8, 5), "the second varRef did not change");
        expect_equal(aclSetOutputTensorAddr(phase.executor, 0, call.var, call.var.address()), 0,
                     "aclSetOutputTensorAddr's status");
        expect_equal(aclSetTensorAddr(phase.executor, 5, call.step, call.step.address()), 0,
                     "aclSetTensorAddr's status");
        expect_equal(aclSetInputTensorAddr(phase.executor, 6, call.var, nullptr), 161002, "the status of input 6");
        expect_equal(aclSetOutputTensorAddr(phase.executor, 4, call.var, nullptr), 161002, "the status of output 4");
        recent_error();
        expect_equal(aclDestroyAclOpExecutor(phase.executor), 0, "the status of destroying it");
    }};

}  // namespace
