// What aclnnEmbedding and aclnnEmbeddingDenseBackward do; tests/phase_one has what they refuse.
#include "tests/calls.h"

namespace {

using namespace test;

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
