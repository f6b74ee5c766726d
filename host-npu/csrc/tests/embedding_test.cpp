// What aclnnEmbedding and aclnnEmbeddingDenseBackward accept and refuse.
#include "tests/calls.h"

namespace {

using namespace test;

const Shape kNineDims{1, 1, 1, 1, 1, 1, 1, 2, 3};
const Shape kNineDimsOfIndices{1, 1, 1, 1, 1, 1, 1, 1, 2};

const Case null_results{"embedding_dense_backward/null_results", [] { check_null_results<EmbeddingDenseBackward>(); }};
const Case null_results_forward{"embedding/null_results", [] { check_null_results<Embedding>(); }};

template <class Call>
Row<Call> of_grad(const char* name, aclDataType dtype) {
    return {name, [=](Call& call) { call.grad = {dtype, {2, 3}}; }, 161002};
}

template <class Call>
Row<Call> of_indices(const char* name, aclDataType dtype, aclnnStatus status) {
    return {name, [=](Call& call) { call.indices = {dtype, call.indices.shape(), {1}}; }, status};
}

const Case refusals{
    "embedding_dense_backward/refusals", [] {
        using Call = EmbeddingDenseBackward;
        check_rows<Call>({
            {"no grad", [](auto& call) { call.grad = {}; }, 161001},
            {"no indices", [](auto& call) { call.indices = {}; }, 161001},
            {"no out", [](auto& call) { call.out = {}; }, 161001},
            of_grad<Call>("grad float64", ACL_DOUBLE),
            of_grad<Call>("grad int32", ACL_INT32),
            of_grad<Call>("grad int64", ACL_INT64),
            of_grad<Call>("grad int16", ACL_INT16),
            of_grad<Call>("grad int8", ACL_INT8),
            of_grad<Call>("grad uint8", ACL_UINT8),
            of_grad<Call>("grad bool", ACL_BOOL),
            of_grad<Call>("grad complex64", ACL_COMPLEX64),
            of_indices<Call>("indices bfloat16", ACL_BF16, 161002),
            of_indices<Call>("indices complex64", ACL_COMPLEX64, 161002),
            {"out float64", [](auto& call) { call.out = {ACL_DOUBLE, {4, 3}}; }, 161002},
            {"grad of 9 dimensions", [](auto& call) { call.grad = floats(kNineDims); }, 161002},
            {"indices of 9 dimensions", [](auto& call) { call.indices = {ACL_INT64, kNineDimsOfIndices}; }, 161002},
            {"out of 9 dimensions", [](auto& call) { call.out = floats(kNineDims); }, 161002},
            {"too many indices", [](auto& call) { call.indices = {ACL_INT64, {4, 3}}; }, 161002},
            {"too few indices", [](auto& call) { call.indices = {ACL_INT64, {1}}; }, 161002},
            {"out of other rows", [](auto& call) { call.out = floats({5, 3}); }, 161002},
            {"out of other columns", [](auto& call) { call.out = floats({4, 2}); }, 161002},
            {"out of one dimension", [](auto& call) { call.out = floats({12}); }, 161002},
            {"out wider than an empty grad", [](auto& call) { call.grad = floats({4, 3, 3, 3, 0}); }, 161002},
            {"grad in a private format",
             [](auto& call) { call.grad = {ACL_FLOAT, {2, 3}, {0}, {.format = ACL_FORMAT_NC1HWC0}}; }, 161002},
            {"indices in a private format",
             [](auto& call) { call.indices = {ACL_INT64, {2}, {0}, {.format = ACL_FORMAT_NC1HWC0}}; }, 161002},
            {"out in a private format",
             [](auto& call) { call.out = {ACL_FLOAT, {4, 3}, {0}, {.format = ACL_FORMAT_FRACTAL_NZ}}; }, 161002},
        });
    }};

const Case accepted{"embedding_dense_backward/accepted", [] {
                        using Call = EmbeddingDenseBackward;
                        check_rows<Call>({
                            of_indices<Call>("indices float32", ACL_FLOAT, 0),
                            of_indices<Call>("indices float16", ACL_FLOAT16, 0),
                            of_indices<Call>("indices float64", ACL_DOUBLE, 0),
                            of_indices<Call>("indices int32", ACL_INT32, 0),
                            of_indices<Call>("indices int16", ACL_INT16, 0),
                            of_indices<Call>("indices int8", ACL_INT8, 0),
                            of_indices<Call>("indices uint8", ACL_UINT8, 0),
                            of_indices<Call>("indices bool", ACL_BOOL, 0),
                            {"only the number of indices counts", [](auto& call) { call.grad = floats({1, 2, 1, 3}); }},
                            {"float16 to float32", [](auto& call) { call.grad = {ACL_FLOAT16, {2, 3}}; }},
                            {"padding beyond the rows", [](auto& call) { call.padding_idx = 1000; }},
                        });
                    }};

// Only the formats that tile a tensor are refused, not those that have no name.
const Case formats{"embedding_dense_backward/formats", [] {
                       std::vector<Row<EmbeddingDenseBackward>> rows;
                       for (const int format : {-1, 31, 39, 99}) {
                           const View view{.format = static_cast<aclFormat>(format)};
                           rows.push_back({"an unusual format", [=](auto& call) {
                                               call.grad = {ACL_FLOAT, {2, 3}, {1}, view};
                                               call.indices = {ACL_INT64, {2}, {1}, view};
                                               call.out = {ACL_FLOAT, {4, 3}, {1}, view};
                                           }});
                       }
                       for (const int format : {3, 4, 12, 29, 32, 33, 50, 51, 52, 53, 54}) {
                           const View view{.format = static_cast<aclFormat>(format)};
                           rows.push_back({"a private format",
                                           [=](auto& call) { call.grad = {ACL_FLOAT, {2, 3}, {1}, view}; }, 161002});
                       }
                       check_rows(rows);
                   }};

const Case no_rows_to_scale{"embedding_dense_backward/no_rows_to_scale",
                            [] {
                                const auto status = [](bool scale) {
                                    EmbeddingDenseBackward call;
                                    call.out = floats({0, 3});
                                    call.num_weights = 0;
                                    call.scale = scale;
                                    const auto phase = phase_one(call);
                                    if (phase.status == 0) aclDestroyAclOpExecutor(phase.executor);
                                    recent_error();
                                    return phase.status;
                                };
                                expect_equal(status(true), 561103, "the status with scaling");
                                expect_equal(status(false), 0, "the status without scaling");
                            },
                            {"Ascend910B", "Ascend910_93"}};

const Case empty{"embedding_dense_backward/empty_fills_with_zeros", [] {
                     EmbeddingDenseBackward call;
                     call.grad = floats({0, 3});
                     call.indices = {ACL_INT64, {0}};
                     run(call);
                     expect_close(call.out.values(), std::vector<double>(12, 0), 0, "out");
                 }};

const Case negative_padding{"embedding_dense_backward/negative_padding_is_no_padding", [] {
                                EmbeddingDenseBackward call;
                                call.indices = {ACL_INT64, {2}, {3, 0}};
                                call.padding_idx = static_cast<std::uint64_t>(-1);
                                run(call);
                                expect_close(call.out.values(), {4, 5, 6, 0, 0, 0, 0, 0, 0, 1, 2, 3}, 0, "out");
                            }};

const Case out_of_range{"embedding_dense_backward/index_out_of_range_is_a_device_fault", [] {
                            for (const double index : {4.0, -2.0}) {
                                EmbeddingDenseBackward call;
                                call.indices = {ACL_INT64, {2}, {1, index}};
                                const auto phase = phase_one(call);
                                expect_equal(phase.status, 0, "phase one does not look at values, its status");
                                expect(launch(call, phase) != 0, "index ", index, " went unnoticed");
                                expect(recent_error().has_value(), "no message");
                                EmbeddingDenseBackward good;
                                run(good);
                            }
                        }};

const Case narrowed{"embedding_dense_backward/indices_are_narrowed_to_32_bits", [] {
                        EmbeddingDenseBackward call;
                        call.indices = {ACL_INT64, {2}, {1, 4294967296.0 + 2}};
                        run(call);
                        expect_close(call.out.values(), {0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0}, 0, "out");
                    }};

const Case skipped_on_950{"embedding_dense_backward/index_out_of_range_is_skipped",
                          [] {
                              EmbeddingDenseBackward call;
                              call.indices = {ACL_INT64, {2}, {1, -3}};
                              run(call);
                              expect_close(call.out.values(), {0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0}, 0, "out");
                          },
                          {"Ascend950"}};

const Case no_310p{"embedding_dense_backward/no_kernel",
                   [] {
                       EmbeddingDenseBackward call;
                       expect_equal(phase_one(call).status, 561103, "the status");
                   },
                   {"Ascend310P"}};

const Case counts_fit{"embedding_dense_backward/counts_fit_the_unified_buffer",
                      [] {
                          const auto status = [](std::int64_t dim, aclDataType dtype) {
                              EmbeddingDenseBackward call;
                              call.grad = floats({2, dim});
                              call.indices = {dtype, {2}};
                              call.out = floats({4, dim});
                              call.scale = true;
                              const auto phase = phase_one(call);
                              if (phase.status == 0) aclDestroyAclOpExecutor(phase.executor);
                              return phase.status;
                          };
                          // With four rows on 32 cores there are four counts.
                          expect_equal(status((180192 - 16) / 36 - 1, ACL_INT32), 0, "the status below the limit");
                          expect_equal(status((180192 - 16) / 36, ACL_INT32), 561103, "the status at the limit");
                          expect_equal(status((180192 - 32) / 20, ACL_INT64), 561103, "the status with int64 indices");
                          recent_error();
                      },
                      {"Ascend910"}};

template <bool accepts>
void bfloat16() {
    check_rows<EmbeddingDenseBackward>(
        {{"grad bfloat16", [](auto& call) { call.grad = {ACL_BF16, {2, 3}}; }, accepts ? 0 : 161002},
         {"out bfloat16", [](auto& call) { call.out = {ACL_BF16, {4, 3}}; }, accepts ? 0 : 161002},
         {"grad float16", [](auto& call) { call.grad = {ACL_FLOAT16, {2, 3}}; }}});
    check_rows<Embedding>({{"bfloat16",
                            [](auto& call) {
                                call.weight = {ACL_BF16, {10, 3}};
                                call.out = {ACL_BF16, {4, 3}};
                            },
                            accepts ? 0 : 161002}});
}

const Case bfloat16_accepted{
    "embedding/bfloat16_accepted", bfloat16<true>, {"Ascend910B", "Ascend910_93", "Ascend950"}};
const Case bfloat16_refused{"embedding/bfloat16_refused", bfloat16<false>, {"Ascend910"}};

const Case refusals_forward{
    "embedding/refusals", [] {
        using Call = Embedding;
        check_rows<Call>({
            {"no weight", [](auto& call) { call.weight = {}; }, 161001},
            {"no indices", [](auto& call) { call.indices = {}; }, 161001},
            {"no out", [](auto& call) { call.out = {}; }, 161001},
            of_indices<Call>("indices float16", ACL_FLOAT16, 161002),
            of_indices<Call>("indices float32", ACL_FLOAT, 161002),
            of_indices<Call>("indices float64", ACL_DOUBLE, 161002),
            of_indices<Call>("indices uint8", ACL_UINT8, 161002),
            of_indices<Call>("indices int8", ACL_INT8, 161002),
            of_indices<Call>("indices int16", ACL_INT16, 161002),
            of_indices<Call>("indices bool", ACL_BOOL, 161002),
            of_indices<Call>("indices complex64", ACL_COMPLEX64, 161002),
            of_indices<Call>("indices int32", ACL_INT32, 0),
            {"indices of 9 dimensions", [](auto& call) { call.indices = {ACL_INT64, kNineDimsOfIndices}; }, 161002},
            {"out of another type", [](auto& call) { call.out = {ACL_FLOAT16, {4, 3}}; }, 161002},
            {"out of another rank", [](auto& call) { call.out = floats({12}); }, 161002},
            {"out of other rows", [](auto& call) { call.out = floats({5, 3}); }, 161002},
            {"out of another width", [](auto& call) { call.out = floats({4, 2}); }, 561103},
            {"one element of a weight of one dimension",
             [](auto& call) {
                 call.weight = floats({3}, {5});
                 call.indices = {ACL_INT64, {}, {1}};
                 call.out = floats({1});
             }},
            {"elements of a weight of one dimension",
             [](auto& call) {
                 call.weight = floats({3}, {5});
                 call.out = floats({4, 1});
             },
             561103},
        });
    }};

template <aclnnStatus status>
void scalar_index_of_wide_rows() {
    EmbeddingDenseBackward call;
    call.num_weights = 5 * 2056 + 1;
    call.padding_idx = call.num_weights;
    call.indices = {ACL_INT64, {}, {1}};
    call.grad = floats({2056}, {1});
    call.out = floats({static_cast<std::int64_t>(call.num_weights), 2056});
    const auto phase = phase_one(call);
    expect_equal(phase.status, status, "the status");
    if (phase.status == 0) aclDestroyAclOpExecutor(phase.executor);
    recent_error();
}

const Case scalar_index{"embedding_dense_backward/a_scalar_index_of_wide_rows",
                        scalar_index_of_wide_rows<0>,
                        {"Ascend910", "Ascend910B", "Ascend910_93"}};
const Case no_scalar_index{"embedding_dense_backward/the_950_tiles_no_scalar_index_of_wide_rows",
                           scalar_index_of_wide_rows<561103>,
                           {"Ascend950"}};

const Case dtypes_forward{
    "embedding/dtypes", [] {
        std::vector<Row<Embedding>> rows;
        for (const auto dtype : {ACL_DOUBLE, ACL_FLOAT, ACL_FLOAT16, ACL_INT64, ACL_INT32, ACL_INT16, ACL_INT8,
                                 ACL_UINT8, ACL_BOOL, ACL_COMPLEX64, ACL_COMPLEX128}) {
            rows.push_back({"a type of the list", [=](auto& call) {
                                call.weight = {dtype, {10, 3}};
                                call.out = {dtype, {4, 3}};
                            }});
        }
        check_rows<Embedding>(rows);
    }};

const Case empty_forward{"embedding/empty_leaves_out_untouched", [] {
                             Embedding call;
                             call.weight = floats({10, 0});
                             call.out = floats({4, 0});
                             run(call);
                             Embedding none;
                             none.indices = {ACL_INT64, {0}};
                             none.out = {ACL_FLOAT, {0, 3}, {7}, {.storage = Shape{1}}};
                             run(none);
                             expect_close(none.out.values(), {7}, 0, "out's storage");
                         }};

const Case out_of_range_forward{"embedding/index_out_of_range_is_a_device_fault", [] {
                                    for (const double index : {10.0, -1.0}) {
                                        Embedding call;
                                        call.indices = {ACL_INT64, {4}, {1, 2, 3, index}};
                                        expect(launch(call, phase_one(call)) != 0, "index ", index, " went unnoticed");
                                        recent_error();
                                    }
                                    Embedding good;
                                    run(good);
                                }};

}  // namespace
