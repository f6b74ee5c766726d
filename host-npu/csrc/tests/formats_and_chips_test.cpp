// Single operators in other formats and on other chips; tests/npu/test_simulated_*.py test the rest.
#include "tests/calls.h"

namespace {

using namespace test;

CASE("mse_loss/workspace_depends_on_the_format_and_the_reduction") {
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
}

// The tiling treats a scalar as one element.
CASE("binary_cross_entropy/one_element_fits_a_scalar", {"Ascend950"}) {
    for (const auto& [self, weight] : {std::pair{Shape{}, Shape{1}}, {Shape{1}, Shape{}}}) {
        BinaryCrossEntropy call;
        call.self = floats(self, {0.3});
        call.target = floats(self, {0.5});
        call.weight = floats(weight, {2});
        call.out = floats(self);
        run(call);
        expect_close(call.out.values(), {2 * 0.780324}, 1e-5, "out");
    }
}

CASE("embedding_dense_backward/index_out_of_range_is_skipped", {"Ascend950"}) {
    EmbeddingDenseBackward call;
    call.indices = {ACL_INT64, {2}, {1, -3}};
    run(call);
    expect_close(call.out.values(), {0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0}, 0, "out");
}

}  // namespace
