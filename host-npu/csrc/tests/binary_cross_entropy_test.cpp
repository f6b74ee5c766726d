// What aclnnBinaryCrossEntropy and aclnnBinaryCrossEntropyBackward accept and refuse.
#include "tests/calls.h"

namespace {

using namespace test;

const Shape kNineDims{1, 1, 1, 1, 1, 1, 1, 2, 2};

const Case null_results{"binary_cross_entropy_backward/null_results",
                        [] { check_null_results<BinaryCrossEntropyBackward>(); }};
const Case null_results_forward{"binary_cross_entropy/null_results", [] { check_null_results<BinaryCrossEntropy>(); }};

const Case refusals{
    "binary_cross_entropy_backward/refusals", [] {
        check_rows<BinaryCrossEntropyBackward>({
            {"no gradOutput", [](auto& call) { call.grad = {}; }, 161001},
            {"no self", [](auto& call) { call.self = {}; }, 161001},
            {"no target", [](auto& call) { call.target = {}; }, 161001},
            {"no out", [](auto& call) { call.out = {}; }, 161001},
            {"gradOutput int64", [](auto& call) { call.grad = {ACL_INT64, {2, 2}}; }, 161002},
            {"self int64", [](auto& call) { call.self = {ACL_INT64, {2, 2}}; }, 161002},
            {"target int64", [](auto& call) { call.target = {ACL_INT64, {2, 2}}; }, 161002},
            {"weight int64", [](auto& call) { call.weight = {ACL_INT64, {2, 2}}; }, 161002},
            {"out int64", [](auto& call) { call.out = {ACL_INT64, {2, 2}}; }, 161002},
            {"float64", [](auto& call) { call.self = {ACL_DOUBLE, {2, 2}}; }, 161002},
            {"out of 9 dimensions", [](auto& call) { call.out = floats(kNineDims); }, 161002},
            {"target in another format",
             [](auto& call) { call.target = {ACL_FLOAT, {2, 2}, {0}, {.format = ACL_FORMAT_NCHW}}; }, 161002},
            {"weight in another format",
             [](auto& call) { call.weight = {ACL_FLOAT, {2, 2}, {0}, {.format = ACL_FORMAT_NCHW}}; }, 161002},
            {"target does not broadcast", [](auto& call) { call.target = floats({2, 3}); }, 161002},
            {"weight does not broadcast", [](auto& call) { call.weight = floats({3, 2}); }, 161002},
            {"gradOutput does not broadcast", [](auto& call) { call.grad = floats({3}); }, 161002},
            {"out is a scalar", [](auto& call) { call.out = floats({}); }, 161002},
            {"reduction 3", [](auto& call) { call.reduction = 3; }, 161002},
            {"reduction -1", [](auto& call) { call.reduction = -1; }, 161002},
        });
    }};

// Where self would have to grow, the refusal is not logged.
const Case silent_refusals{
    "binary_cross_entropy_backward/silent_refusals", [] {
        check_rows<BinaryCrossEntropyBackward>({
            {"gradOutput of 9 dimensions", [](auto& call) { call.grad = floats(kNineDims); }, 161002, false},
            {"target grows self", [](auto& call) { call.target = floats({3, 2, 2}); }, 161002, false},
            {"weight grows self", [](auto& call) { call.weight = floats({1, 2, 2}); }, 161002, false},
            {"gradOutput of one element for a scalar",
             [](auto& call) {
                 for (auto* tensor : {&call.self, &call.target, &call.weight, &call.out}) {
                     *tensor = floats({});
                 }
                 call.grad = floats({1});
             },
             161002, false},
        });
    }};

const Case accepted{"binary_cross_entropy_backward/accepted", [] {
                        check_rows<BinaryCrossEntropyBackward>({
                            {"no weight", [](auto& call) { call.weight = {}; }},
                            {"mean", [](auto& call) { call.reduction = 1; }},
                            {"sum, no weight",
                             [](auto& call) {
                                 call.reduction = 2;
                                 call.weight = {};
                             }},
                            {"mixed types",
                             [](auto& call) {
                                 call.self = {ACL_FLOAT16, {2, 2}, {0.5}};
                                 call.target = {ACL_BF16, {2, 2}, {0.5}};
                             }},
                            {"float16 to float32",
                             [](auto& call) {
                                 for (auto* tensor : {&call.grad, &call.self, &call.target, &call.weight}) {
                                     *tensor = {ACL_FLOAT16, {2, 2}, {0.5}};
                                 }
                             }},
                            {"broadcasting to self",
                             [](auto& call) {
                                 call.grad = floats({1});
                                 call.target = floats({2});
                                 call.weight = floats({2, 1});
                             }},
                            {"scalars",
                             [](auto& call) {
                                 for (auto* tensor : {&call.grad, &call.self, &call.target, &call.weight, &call.out})
                                     *tensor = floats({});
                             }},
                            {"private format",
                             [](auto& call) {
                                 const View view{.format = ACL_FORMAT_NC1HWC0};
                                 for (auto* tensor : {&call.self, &call.target, &call.weight})
                                     *tensor = {ACL_FLOAT, {2, 2}, {0.5}, view};
                             }},
                        });
                    }};

const Case out_formats{
    "binary_cross_entropy_backward/out_format_names_the_dimensions", [] {
        const auto out = [](const char* name, aclFormat format, const Shape& shape, aclnnStatus status) {
            return Row<BinaryCrossEntropyBackward>{name,
                                                   [=](auto& call) {
                                                       for (auto* tensor : {&call.self, &call.target, &call.grad}) {
                                                           *tensor = floats(shape, {0.5});
                                                       }
                                                       call.weight = {};
                                                       call.out = {ACL_FLOAT, shape, {0}, {.format = format}};
                                                   },
                                                   status};
        };
        const auto dhwcn = static_cast<aclFormat>(31);
        check_rows<BinaryCrossEntropyBackward>({
            out("NCHW of 2 dimensions", ACL_FORMAT_NCHW, {2, 2}, 561103),
            out("NCHW of 4 dimensions", ACL_FORMAT_NCHW, {2, 1, 1, 2}, 0),
            out("HWCN of 3 dimensions", ACL_FORMAT_HWCN, {2, 1, 2}, 561103),
            out("NCL of 2 dimensions", ACL_FORMAT_NCL, {2, 2}, 561103),
            out("NCL of 3 dimensions", ACL_FORMAT_NCL, {2, 1, 2}, 0),
            out("NCDHW of 4 dimensions", ACL_FORMAT_NCDHW, {2, 1, 1, 2}, 561103),
            out("DHWCN of 2 dimensions", dhwcn, {2, 2}, 561103),
            out("NC of 3 dimensions", ACL_FORMAT_NC, {2, 1, 2}, 0),
            out("FRACTAL_NZ of 2 dimensions", ACL_FORMAT_FRACTAL_NZ, {2, 2}, 0),
        });
    }};

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

template <bool accepts>
void bfloat16() {
    check_rows<BinaryCrossEntropyBackward>(
        {{"self bfloat16", [](auto& call) { call.self = {ACL_BF16, {2, 2}, {0.5}}; }, accepts ? 0 : 161002},
         {"weight bfloat16", [](auto& call) { call.weight = {ACL_BF16, {2, 2}, {0.5}}; }, accepts ? 0 : 161002},
         {"self float16", [](auto& call) { call.self = {ACL_FLOAT16, {2, 2}, {0.5}}; }}});
}

const Case bfloat16_accepted{
    "binary_cross_entropy_backward/bfloat16_accepted", bfloat16<true>, {"Ascend910B", "Ascend910_93", "Ascend950"}};
const Case bfloat16_refused{
    "binary_cross_entropy_backward/bfloat16_refused", bfloat16<false>, {"Ascend910", "Ascend310P"}};

const Case refusals_forward{
    "binary_cross_entropy/refusals", [] {
        check_rows<BinaryCrossEntropy>({
            {"no self", [](auto& call) { call.self = {}; }, 561103},
            {"no target", [](auto& call) { call.target = {}; }, 561103},
            {"no out", [](auto& call) { call.out = {}; }, 561103},
            {"self float64", [](auto& call) { call.self = {ACL_DOUBLE, {2, 2}}; }, 161002},
            {"target float64", [](auto& call) { call.target = {ACL_DOUBLE, {2, 2}}; }, 161002},
            {"weight float64", [](auto& call) { call.weight = {ACL_DOUBLE, {2, 2}}; }, 161002},
            {"out float64", [](auto& call) { call.out = {ACL_DOUBLE, {2, 2}}; }, 161002},
            {"reduction 3", [](auto& call) { call.reduction = 3; }, 161002},
            {"target of another shape", [](auto& call) { call.target = floats({5, 7}); }, 161002},
            {"target would broadcast", [](auto& call) { call.target = floats({2}); }, 161002},
            {"float16 with float32 out",
             [](auto& call) {
                 for (auto* tensor : {&call.self, &call.target, &call.weight}) *tensor = {ACL_FLOAT16, {2, 2}, {0.5}};
             },
             161002},
            {"out of another shape", [](auto& call) { call.out = floats({4}); }, 161002},
            {"mean to one element",
             [](auto& call) {
                 call.reduction = 1;
                 call.out = floats({1});
             }},
            {"mean to two elements",
             [](auto& call) {
                 call.reduction = 1;
                 call.out = floats({2});
             },
             161002},
            {"no weight", [](auto& call) { call.weight = {}; }},
            {"one element to one element of another rank",
             [](auto& call) {
                 call.self = floats({1, 1}, {0.3});
                 call.target = floats({1, 1}, {0.5});
                 call.weight = {};
                 call.out = floats({1});
             }},
            {"no weight, float32 with float16 out",
             [](auto& call) {
                 call.weight = {};
                 call.out = {ACL_FLOAT16, {2, 2}};
             },
             561103},
            {"no weight, float32 with float16 target",
             [](auto& call) {
                 call.weight = {};
                 call.target = {ACL_FLOAT16, {2, 2}, {0.5}};
             },
             561103},
            {"no weight, empty, float16 out",
             [](auto& call) {
                 call.weight = {};
                 call.self = floats({0});
                 call.target = floats({0});
                 call.out = {ACL_FLOAT16, {}};
             },
             561103},
            {"the out's shape is looked at before its type",
             [](auto& call) {
                 call.weight = {};
                 call.out = {ACL_FLOAT16, {4}};
             },
             161002},
        });
    }};

template <aclnnStatus status>
void smaller_weight() {
    check_rows<BinaryCrossEntropy>({{"weight broadcasts", [](auto& call) { call.weight = floats({2}, {1}); }, status}});
}

const Case weight_broadcasts{"binary_cross_entropy/weight_broadcasts", smaller_weight<0>};
const Case weight_does_not_broadcast{
    "binary_cross_entropy/weight_does_not_broadcast", smaller_weight<561103>, {"Ascend950"}};

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

template <aclnnStatus status>
void nine_dimensions() {
    for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
        BinaryCrossEntropy call;
        for (auto* tensor : {&call.self, &call.target, &call.weight}) *tensor = floats(Shape(9, 1), {0.5});
        call.reduction = reduction;
        call.out = floats(reduction == 0 ? Shape(9, 1) : Shape{});
        const auto phase = phase_one(call);
        expect_equal(phase.status, reduction == 0 ? 0 : status, "the status");
        if (phase.status == 0) aclDestroyAclOpExecutor(phase.executor);
        recent_error();
    }
}

const Case reduced{"binary_cross_entropy/nine_dimensions_are_reduced",
                   nine_dimensions<0>,
                   {"Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P"}};
const Case not_reduced{"binary_cross_entropy/the_950_reduces_eight_dimensions", nine_dimensions<561103>, {"Ascend950"}};

const Case undefined_formats{"binary_cross_entropy_backward/255_is_the_undefined_format", [] {
                                 BinaryCrossEntropyBackward call;
                                 call.self = {ACL_FLOAT, {2, 2}, {0.3}, {.format = static_cast<aclFormat>(255)}};
                                 call.target = {ACL_FLOAT, {2, 2}, {0.5}, {.format = ACL_FORMAT_UNDEFINED}};
                                 call.weight = {ACL_FLOAT, {2, 2}, {1}, {.format = ACL_FORMAT_UNDEFINED}};
                                 run(call);
                             }};

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
