// aclnnCast and aclnnConstantPadNd.
#include <cmath>

#include "aclnnop/aclnn_cast.h"
#include "aclnnop/aclnn_constant_pad_nd.h"
#include "tests/calls.h"

namespace {

using namespace test;

struct Cast {
    Tensor self = floats({2, 2}, {0, 1.5, -2, 3}), out = {ACL_INT32, {2, 2}};
    aclDataType dtype = ACL_INT32;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnCastGetWorkspaceSize(self, dtype, out, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnCast;
};

struct ConstantPadNd {
    Tensor self = floats({2, 2}, {1, 2, 3, 4}), out = floats({2, 5});
    std::optional<Shape> pad = Shape{1, 2};
    std::optional<double> value = 7;
    aclDataType value_dtype = ACL_DOUBLE;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        const auto* const array = pad ? aclCreateIntArray(pad->data(), pad->size()) : nullptr;
        const auto* const scalar = value ? aclCreateScalar(&*value, value_dtype) : nullptr;
        const auto status = aclnnConstantPadNdGetWorkspaceSize(self, array, scalar, out, size, executor);
        if (array != nullptr) aclDestroyIntArray(array);
        if (scalar != nullptr) aclDestroyScalar(scalar);
        return status;
    }
    static constexpr PhaseTwo phase_two = aclnnConstantPadNd;
};

const Case cast_refusals{"cast/refusals", [] {
                             check_rows<Cast>({
                                 {"no self", [](auto& call) { call.self = {}; }, 161001},
                                 {"no out", [](auto& call) { call.out = {}; }, 161001},
                                 {"out of another dtype", [](auto& call) { call.dtype = ACL_INT64; }, 161002},
                                 {"out of another shape", [](auto& call) { call.out = {ACL_INT32, {4}}; }, 161002},
                                 {"empty",
                                  [](auto& call) {
                                      call.self = floats({0});
                                      call.out = {ACL_INT32, {0}};
                                  }},
                             });
                             check_null_results<Cast>();
                         }};

const Case casts{"cast/results", [] {
                     Cast call;
                     run(call);
                     expect_close(call.out.values(), {0, 1, -2, 3}, 0, "out");
                     call.out = {ACL_BOOL, {2, 2}};
                     call.dtype = ACL_BOOL;
                     run(call);
                     expect_close(call.out.values(), {0, 1, 1, 1}, 0, "out of bool");
                 }};

const Case saturated_casts{"cast/integers_of_32_bits_saturate", [] {
                               Cast call;
                               call.self = floats({2, 2}, {3e9, -3e9, INFINITY, NAN});
                               run(call);
                               expect_close(call.out.values(), {2147483647.0, -2147483648.0, 2147483647.0, 0}, 0,
                                            "out");
                           }};

const Case pad_refusals{"constant_pad_nd/refusals", [] {
                            check_rows<ConstantPadNd>({
                                {"no self", [](auto& call) { call.self = {}; }, 161001},
                                {"no pad", [](auto& call) { call.pad.reset(); }, 161001},
                                {"no value", [](auto& call) { call.value.reset(); }, 161001},
                                {"no out", [](auto& call) { call.out = {}; }, 161001},
                                {"an odd pad", [](auto& call) { call.pad = {1}; }, 161002},
                                {"more pads than dimensions", [](auto& call) { call.pad = Shape(6); }, 161002},
                                {"a negative pad", [](auto& call) { call.pad = {-1, 0}; }, 161002},
                                {"out of another shape", [](auto& call) { call.out = floats({2, 4}); }, 161002},
                                {"out of another dtype", [](auto& call) { call.out = {ACL_FLOAT16, {2, 5}}; }, 161002},
                                {"a value of complex32", [](auto& call) { call.value_dtype = ACL_COMPLEX32; }, 161002},
                            });
                            check_null_results<ConstantPadNd>();
                        }};

const Case pads{"constant_pad_nd/results", [] {
                    ConstantPadNd call;
                    run(call);
                    expect_close(call.out.values(), {7, 1, 2, 7, 7, 7, 3, 4, 7, 7}, 0, "out");
                    // The same call with another value is not the one that the cache knows.
                    call.value = 8;
                    run(call);
                    expect_close(call.out.values(), {8, 1, 2, 8, 8, 8, 3, 4, 8, 8}, 0, "out of another value");
                    call.pad = {0, 0, 1, 0};
                    call.out = floats({3, 2});
                    run(call);
                    expect_close(call.out.values(), {8, 8, 1, 2, 3, 4}, 0, "out with another row");
                    call.self = {ACL_INT8, {0}};
                    call.pad = {1, 1};
                    call.out = {ACL_INT8, {2}};
                    run(call);
                    expect_close(call.out.values(), {8, 8}, 0, "out of an empty tensor");
                }};

}  // namespace
