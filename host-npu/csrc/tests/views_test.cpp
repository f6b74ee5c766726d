// Views that reach outside their storage: the contiguous copy of an input refuses them.
#include <cstdlib>
#include <limits>

#include "tests/calls.h"

namespace {

using namespace test;

// Strides that leave gaps, in a storage that is as large as the view has elements.
template <class Call>
Row<Call> outside(const char* name, Tensor Call::* member, aclnnStatus status = 561103) {
    return {name,
            [=](Call& call) {
                auto& tensor = call.*member;
                const auto& shape = tensor.shape();
                Shape strides(shape.size());
                std::int64_t stride = 2;
                for (auto index = shape.size(); index-- > 0;) {
                    strides[index] = stride;
                    stride *= shape[index];
                }
                tensor = {tensor.dtype(), shape, {0.5}, {.strides = strides, .storage = shape}};
            },
            status};
}

const Case refusals{
    "views/outside_of_the_storage", [] {
        check_rows<MseLoss>({outside("self", &MseLoss::self), outside("target", &MseLoss::target)});
        check_rows<MseLossBackward>({outside("gradOutput", &MseLossBackward::grad),
                                     outside("self", &MseLossBackward::self),
                                     outside("target", &MseLossBackward::target)});
        check_rows<BinaryCrossEntropy>({outside("self", &BinaryCrossEntropy::self),
                                        outside("target", &BinaryCrossEntropy::target),
                                        outside("weight", &BinaryCrossEntropy::weight)});
        using Backward = BinaryCrossEntropyBackward;
        check_rows<Backward>({outside("gradOutput", &Backward::grad), outside("self", &Backward::self),
                              outside("target", &Backward::target), outside("weight", &Backward::weight)});
        check_rows<Embedding>({outside("weight", &Embedding::weight), outside("indices", &Embedding::indices)});
        check_rows<EmbeddingDenseBackward>(
            {outside("grad", &EmbeddingDenseBackward::grad), outside("indices", &EmbeddingDenseBackward::indices)});
        check_rows<OnlineMaxSum>({outside("input", &OnlineMaxSum::input), outside("weight", &OnlineMaxSum::weight),
                                  outside("target", &OnlineMaxSum::target)});
        check_rows<LossWithMaxSum>(
            {outside("logitsMax", &LossWithMaxSum::max), outside("sumExpLogits", &LossWithMaxSum::sum),
             outside("predictedLogits", &LossWithMaxSum::predicted), outside("logits", &LossWithMaxSum::logits)});
        check_rows<LossGrad>({outside("grad", &LossGrad::grad),
                              outside("input", &LossGrad::input),
                              outside("weight", &LossGrad::weight),
                              outside("softmax", &LossGrad::softmax),
                              {"statistics beside a softmax", [](auto& call) {
                                   call.sum = {ACL_FLOAT, {3}, {1}, {.strides = Shape{2}, .storage = Shape{3}}};
                               }}});
    }};

// Rows with gaps: the last ones lie behind the storage, in the padding of its memory.
const Case matrices{
    "views/the_matrices_of_an_embedding_are_copied", [] {
        check_rows<Embedding>({{"two matrices",
                                [](auto& call) {
                                    call.weight = {
                                        ACL_FLOAT, {10, 3}, {0.5}, {.strides = Shape{4, 1}, .storage = Shape{10, 3}}};
                                    call.indices = {ACL_INT64, {2, 2}, {1, 2, 3, 4}};
                                    call.out = floats({2, 2, 3});
                                },
                                561103}});
    }};

// The zeros of an empty gradient are made like out, which is copied for that.
const Case empty_gradient{"views/outside_of_an_output_that_is_copied", [] {
                              auto row = outside("out", &EmbeddingDenseBackward::out);
                              const auto change = row.change;
                              row.change = [=](EmbeddingDenseBackward& call) {
                                  call.grad = floats({0, 3});
                                  call.indices = {ACL_INT64, {0}};
                                  change(call);
                              };
                              check_rows<EmbeddingDenseBackward>({row});
                          }};

const Case backwards{
    "views/before_the_storage", [] {
        const auto view = [](std::int64_t offset) { return View{.strides = Shape{-2, 1}, .offset = offset}; };
        check_rows<MseLossBackward>({
            {"one element before", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view(1)}; }, 561103},
            {"one element beyond", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view(3)}; }, 561103},
            {"all within", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view(2)}; }},
        });
    }};

// What is not copied is not looked at: the kernel finds what memory there is.
const Case not_copied{"views/contiguous_views_are_not_looked_at", [] {
                          const auto status = [](Tensor self) {
                              MseLossBackward call;
                              call.self = std::move(self);
                              const auto phase = phase_one(call);
                              if (phase.status == 0) aclDestroyAclOpExecutor(phase.executor);
                              return phase.status;
                          };
                          expect_equal(status({ACL_FLOAT, {2, 2}, {1}, {.storage = Shape{3}}}), 0, "a small storage");
                          expect_equal(status({ACL_FLOAT, {2, 2}, {1}, {.offset = 9}}), 0, "an offset");
                          const View strided{.strides = Shape{9, 9}};
                          expect_equal(status({ACL_FLOAT, {1, 1}, {1}, strided}), 0, "one element");
                      }};

constexpr auto kMost = std::numeric_limits<std::int64_t>::max();

const Case wraps_around{
    "views/no_number_is_so_large_that_it_seems_small", [] {
        const auto view = [](Shape strides, std::int64_t offset) { return View{.strides = strides, .offset = offset}; };
        check_rows<MseLossBackward>({
            {"a stride", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view({kMost, 1}, 2)}; }, 561103},
            {"strides", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view({kMost, kMost}, 1)}; }, 561103},
            {"an offset", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view({2, 2}, kMost)}; }, 561103},
        });
    }};

// The status of a synchronisation after a launch whose only unusual argument is where the result goes.
aclError fault_of(MseLossBackward call) {
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "phase one's status");
    const auto status = launch(call, phase);
    recent_error();
    return status;
}

const Case gaps{"views/a_gap_between_allocations_is_a_device_fault", [] {
                    const Memory first(4), second(4);
                    const auto distance = static_cast<char*>(second.address()) - static_cast<char*>(first.address());
                    const Shape shape{3}, strides{std::abs(distance) / 4 / 2}, storage{kMost};
                    MseLossBackward call;
                    for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) *tensor = floats(shape);
                    aclInitTensor(call.out, shape.data(), 1, ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND,
                                  storage.data(), 1, distance > 0 ? first.address() : second.address());
                    expect(fault_of(std::move(call)) != 0, "the kernel wrote to what is not allocated");
                }};

const Case negative{"views/sizes_below_zero_are_a_device_fault", [] {
                        const Shape shape{-2, -3}, strides{-3, 1}, storage{6};
                        MseLossBackward call;
                        for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) {
                            *tensor = floats({6});
                            aclInitTensor(*tensor, shape.data(), 2, ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND,
                                          storage.data(), 1, tensor->address());
                        }
                        expect(fault_of(std::move(call)) != 0, "the kernel was done with -2 rows of -3 elements");
                    }};

const Case uncountable{"views/more_elements_than_can_be_counted_are_a_device_fault", [] {
                           const Shape shape{std::int64_t{1} << 40, std::int64_t{1} << 40}, strides{0, 0}, storage{1};
                           MseLossBackward call;
                           for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) {
                               aclInitTensor(*tensor, shape.data(), 2, ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND,
                                             storage.data(), 1, tensor->address());
                           }
                           expect(fault_of(std::move(call)) != 0, "the kernel was done with 2^80 elements");
                       }};

}  // namespace
