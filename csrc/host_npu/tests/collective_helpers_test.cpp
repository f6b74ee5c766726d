// The operators that torch_npu's collectives need beside themselves: a cast, and a padding of dimensions.
#include "tests/calls.h"

namespace {

using namespace test;

const Case casts{"numerics/cast", [] {
                     Cast call;
                     call.self = {ACL_FLOAT, {2, 3}, {-1.5, 2.5, 0, 100, 7, 8}, {.strides = Shape{1, 2}}};
                     run(call);
                     expect_close(call.out.values(), {-1, 0, 7, 2, 100, 8}, 0, "integers of a transpose");
                     call.out = {ACL_BOOL, {2, 3}};
                     call.dtype = ACL_BOOL;
                     run(call);
                     expect_close(call.out.values(), {1, 0, 1, 1, 1, 1}, 0, "bool");
                 }};

const Case cast_refusals{"cast/refusals", [] {
                             check_rows<Cast>({
                                 {"no self", [](auto& call) { call.self = {}; }, 161001},
                                 {"no out", [](auto& call) { call.out = {}; }, 161001},
                                 {"out of another dtype", [](auto& call) { call.dtype = ACL_FLOAT; }, 161002},
                                 {"out of another shape", [](auto& call) { call.out = {ACL_INT32, {3, 2}}; }, 161002},
                                 {"a dtype that no kernel has", [](auto& call) { call.dtype = ACL_STRING; }, 161002},
                                 {"9 dimensions",
                                  [](auto& call) {
                                      call.self = floats({1, 1, 1, 1, 1, 1, 1, 2, 3});
                                      call.out = {ACL_INT32, {1, 1, 1, 1, 1, 1, 1, 2, 3}};
                                  },
                                  161002},
                                 {"nothing to nothing",
                                  [](auto& call) {
                                      call.self = floats({0});
                                      call.out = {ACL_INT32, {0}};
                                  }},
                             });
                         }};

const Case paddings{"numerics/constant_pad_nd", [] {
                        ConstantPadNd call;
                        run(call);
                        expect_close(call.out.values(), {9, 1, 2, 9, 9, 9, 3, 4, 9, 9}, 0, "the last dimension");
                        call.padding = Shape{0, -1, 1, 0};
                        call.out = floats({3, 1});
                        run(call);
                        expect_close(call.out.values(), {9, 1, 3}, 0, "a column less and a row more");
                        call.padding = Shape{-1, 0, 0, -1};
                        call.self = {ACL_INT64, {2, 2}, counting(4), {.strides = Shape{1, 2}}};
                        call.out = {ACL_INT64, {1, 1}};
                        run(call);
                        expect_close(call.out.values(), {3}, 0, "the corner of a transpose");
                        call.padding = Shape{-2, 1};
                        call.self = floats({1, 2});
                        call.out = floats({1, 1});
                        run(call);
                        expect_close(call.out.values(), {9}, 0, "nothing is left");
                        call.padding = Shape{};
                        call.self = floats({2}, {1, 2});
                        call.out = floats({2});
                        run(call);
                        expect_close(call.out.values(), {1, 2}, 0, "no padding");
                    }};

const Case padding_refusals{
    "constant_pad_nd/refusals", [] {
        check_rows<ConstantPadNd>({
            {"no self", [](auto& call) { call.self = {}; }, 161001},
            {"no out", [](auto& call) { call.out = {}; }, 161001},
            {"no padding", [](auto& call) { call.padding.reset(); }, 161001},
            {"no value", [](auto& call) { call.value.reset(); }, 161001},
            {"half a pair", [](auto& call) { call.padding = Shape{1}; }, 161002},
            {"more pairs than dimensions", [](auto& call) { call.padding = Shape{1, 2, 0, 0, 0, 0}; }, 161002},
            {"more is cut than there is",
             [](auto& call) {
                 call.padding = Shape{-3, 0};
                 call.out = floats({2, 0});
             },
             161002},
            {"more is cut than numbers count",
             [](auto& call) { call.padding = Shape{std::numeric_limits<std::int64_t>::min(), 5}; }, 161002},
            {"out of another shape", [](auto& call) { call.out = floats({2, 4}); }, 161002},
            {"out of another dtype", [](auto& call) { call.out = {ACL_INT32, {2, 5}}; }, 161002},
            {"nothing",
             [](auto& call) {
                 call.self = floats({0, 2});
                 call.out = floats({0, 5});
             }},
        });
    }};

}  // namespace
