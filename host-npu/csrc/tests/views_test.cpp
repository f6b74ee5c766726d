// Views that extend beyond their storage: the contiguous copy of an input refuses them.
#include <cstdlib>
#include <limits>

#include "tests/calls.h"

namespace {

using namespace test;

// Strides with gaps, in a storage with as many elements as the view.
template <class Call>
Row<Call> outside(const char* name, Tensor Call::* member) {
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
            561103};
}

// CANN continues with a null pointer here; tests/phase_one compares all other operators.
CASE("views/outside_of_the_storage") {
    check_rows<OnlineMaxSum>({outside("input", &OnlineMaxSum::input), outside("weight", &OnlineMaxSum::weight),
                              outside("target", &OnlineMaxSum::target)});
    check_rows<LossGrad>({outside("grad", &LossGrad::grad),
                          outside("input", &LossGrad::input),
                          outside("weight", &LossGrad::weight),
                          outside("softmax", &LossGrad::softmax),
                          {"statistics beside a softmax", [](auto& call) {
                               call.sum = {ACL_FLOAT, {3}, {1}, {.strides = Shape{2}, .storage = Shape{3}}};
                           }}});
}

constexpr auto kMost = std::numeric_limits<std::int64_t>::max();

CASE("views/no_number_is_so_large_that_it_seems_small") {
    const auto view = [](Shape strides, std::int64_t offset) { return View{.strides = strides, .offset = offset}; };
    check_rows<MseLossBackward>({
        {"a stride", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view({kMost, 1}, 2)}; }, 561103},
        {"strides", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view({kMost, kMost}, 1)}; }, 561103},
        {"an offset", [=](auto& call) { call.self = {ACL_FLOAT, {2, 2}, {1}, view({2, 2}, kMost)}; }, 561103},
    });
}

// Launches a call with an unusual output and returns the status of the synchronization.
aclError fault_of(MseLossBackward call) {
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "phase one's status");
    const auto status = launch(call, phase);
    recent_error();
    return status;
}

CASE("views/a_gap_between_allocations_is_a_device_fault") {
    const Memory first(4), second(4);
    const auto distance = static_cast<char*>(second.address()) - static_cast<char*>(first.address());
    const Shape shape{3}, strides{std::abs(distance) / 4 / 2}, storage{kMost};
    MseLossBackward call;
    for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) *tensor = floats(shape);
    aclInitTensor(call.out, shape.data(), 1, ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND, storage.data(), 1,
                  distance > 0 ? first.address() : second.address());
    expect(fault_of(std::move(call)) != 0, "the kernel wrote to what is not allocated");
}

CASE("views/sizes_below_zero_are_a_device_fault") {
    const Shape shape{-2, -3}, strides{-3, 1}, storage{6};
    MseLossBackward call;
    for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) {
        *tensor = floats({6});
        aclInitTensor(*tensor, shape.data(), 2, ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND, storage.data(), 1,
                      tensor->address());
    }
    expect(fault_of(std::move(call)) != 0, "the kernel was done with -2 rows of -3 elements");
}

CASE("views/more_elements_than_can_be_counted_are_a_device_fault") {
    const Shape shape{std::int64_t{1} << 40, std::int64_t{1} << 40}, strides{0, 0}, storage{1};
    MseLossBackward call;
    for (auto* tensor : {&call.grad, &call.self, &call.target, &call.out}) {
        aclInitTensor(*tensor, shape.data(), 2, ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND, storage.data(), 1,
                      tensor->address());
    }
    expect(fault_of(std::move(call)) != 0, "the kernel was done with 2^80 elements");
}

}  // namespace
