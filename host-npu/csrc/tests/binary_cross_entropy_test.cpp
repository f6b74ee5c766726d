// What aclnnBinaryCrossEntropy and aclnnBinaryCrossEntropyBackward do; tests/phase_one has what they refuse.
#include "tests/calls.h"

namespace {

using namespace test;

const Case empty{"binary_cross_entropy_backward/empty_skips_the_shapes", [] {
                     BinaryCrossEntropyBackward call;
                     call.self = floats({2, 0});
                     call.target = floats({3});
                     call.out = floats({5}, {7});
                     const auto phase = phase_one(call);
                     expect_equal(phase.status, 0, "the status");
                     expect_equal(phase.workspace_size, 0u, "workspaceSize");
                     expect_equal(launch(call, phase), 0, "the synchronisation's status");
                     expect_close(call.out.values(), {7, 7, 7, 7, 7}, 0, "out");
                 }};

const Case weight_broadcasts{"binary_cross_entropy/weight_broadcasts", [] {
                                 BinaryCrossEntropy call;
                                 call.weight = floats({2}, {1, 2});
                                 run(call);
                                 expect_close(call.out.values(), {0.780324, 1.560648, 0.780324, 1.560648}, 1e-6, "out");
                             }};

// The tiling takes a scalar for one element.
const Case scalar_weight{"binary_cross_entropy/one_element_fits_a_scalar",
                         [] {
                             for (const auto& [self, weight] : {std::pair{Shape{}, Shape{1}}, {Shape{1}, Shape{}}}) {
                                 BinaryCrossEntropy call;
                                 call.self = floats(self, {0.3});
                                 call.target = floats(self, {0.5});
                                 call.weight = floats(weight, {2});
                                 call.out = floats(self);
                                 run(call);
                                 expect_close(call.out.values(), {2 * 0.780324}, 1e-5, "out");
                             }
                         },
                         {"Ascend950"}};

Shape view_shape(const aclTensor* tensor) {
    std::int64_t* dims = nullptr;
    std::uint64_t rank = 0;
    aclGetViewShape(tensor, &dims, &rank);
    const Shape shape(dims, dims + rank);
    delete[] dims;
    return shape;
}

// Empty tensors have a loss of any shape: that of out's storage, of which out becomes a view.
const Case empty_to_any_shape{"binary_cross_entropy/empty_fills_all_of_out", [] {
                                  for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                                      BinaryCrossEntropy call;
                                      call.reduction = reduction;
                                      call.self = floats({0, 2});
                                      call.target = floats({0, 2});
                                      call.weight = {};
                                      call.out = floats({5}, {7});
                                      run(call);
                                      const double loss = reduction == 1 ? NAN : 0;
                                      expect_close(call.out.values(), std::vector<double>(5, loss), 0, "out");
                                      expect(view_shape(call.out) == Shape{5}, "out has another shape");
                                  }
                              }};

const Case empty_to_the_storage{"binary_cross_entropy/empty_fills_out_s_storage", [] {
                                    BinaryCrossEntropy call;
                                    call.reduction = 2;
                                    call.self = floats({0});
                                    call.target = floats({0});
                                    call.weight = {};
                                    const View view{.strides = Shape{2}, .storage = Shape{2, 3}};
                                    call.out = {ACL_FLOAT, {3}, {7}, view};
                                    run(call);
                                    expect_close(call.out.values(), std::vector<double>(6, 0), 0, "out");
                                    expect(view_shape(call.out) == Shape{2, 3}, "out is not a view of its storage");
                                    // It is changed before out's type is refused.
                                    call.out = {ACL_FLOAT16, {3}, {7}, view};
                                    expect_equal(phase_one(call).status, 561103, "the status");
                                    expect(view_shape(call.out) == Shape{2, 3}, "the refused out was not changed");
                                    recent_error();
                                }};

const Case empty_forward{"binary_cross_entropy/empty", [] {
                             const double results[] = {0, NAN, 0};
                             for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                                 BinaryCrossEntropy call;
                                 call.reduction = reduction;
                                 call.self = floats({0, 2});
                                 call.target = floats({0, 2});
                                 call.weight = {};
                                 call.out = {
                                     ACL_FLOAT, reduction == 0 ? Shape{0, 2} : Shape{}, {7}, {.storage = Shape{1}}};
                                 run(call);
                                 expect_close(call.out.values(), {results[reduction]}, 0, "out");
                             }
                         }};

}  // namespace
