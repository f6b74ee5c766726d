// aclnnFusedLinearCrossEntropyLossGrad: phase one.
#include "opapi/linear_cross_entropy_grad.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

using namespace linear_cross_entropy_grad;

constexpr std::int64_t kMinVocabulary = 128;
constexpr std::int64_t kMaxVocabulary = 65280;
constexpr std::int64_t kMaxExtent = 65535;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return divide_up(value, multiple) * multiple; }

struct Given {
    Named grad, input, weight, target_mask, masked_target, logits_max, sum_exp_logits, softmax, input_grad, weight_grad;

    bool high_performance() const { return softmax.tensor != nullptr; }
    std::int64_t rows() const { return grad->shape[0]; }
    std::int64_t hidden() const { return input->shape[1]; }
    std::int64_t vocabulary() const { return weight->shape[0]; }
};

void check_presence(const Given& given) {
    require(given.high_performance() || (given.logits_max.tensor != nullptr && given.sum_exp_logits.tensor != nullptr),
            kNullPointer,
            "softmaxOptional is a null pointer, so logitsMaxOptional and sumExpLogitsOptional are required");
    require_present({given.grad, given.input, given.weight, given.target_mask, given.masked_target, given.input_grad,
                     given.weight_grad});
}

void check_dtypes(const Given& given) {
    constexpr DtypeSet half{ACL_FLOAT16, ACL_BF16};
    require_dtype(given.grad, {ACL_FLOAT});
    require_dtype(given.input, half);
    require_dtype(given.weight, half);
    require_dtype(given.target_mask, {ACL_BOOL, ACL_UINT8});
    require_dtype(given.masked_target, {ACL_INT32, ACL_INT64});
    if (given.high_performance()) {
        require_dtype(given.softmax, {ACL_FLOAT});
    } else {
        require_dtype(given.logits_max, {ACL_FLOAT});
        require_dtype(given.sum_exp_logits, {ACL_FLOAT});
    }
    for (const auto& argument : {given.weight, given.input_grad, given.weight_grad}) {
        require_same_dtype(argument, given.input);
    }
}

// Calls `check` for every tensor that the mode uses.
template <class Check>
void for_each(const Given& given, const Check& check) {
    for (const auto& argument : {given.grad, given.input, given.weight, given.target_mask, given.masked_target}) {
        check(argument);
    }
    if (given.high_performance()) {
        check(given.softmax);
    } else {
        check(given.logits_max);
        check(given.sum_exp_logits);
    }
    check(given.input_grad);
    check(given.weight_grad);
}

void check_ranks(const Given& given) {
    require_rank(given.grad, 1);
    require_rank(given.input, 2);
    require_rank(given.weight, 2);
    require_rank(given.target_mask, 1);
    require_rank(given.masked_target, 1);
    if (given.high_performance()) {
        require_rank(given.softmax, 2);
    } else {
        require_rank(given.logits_max, 1);
        require_rank(given.sum_exp_logits, 1);
    }
    require_rank(given.input_grad, 2);
    require_rank(given.weight_grad, 2);
}

void check_sizes(const Given& given) {
    const auto rows = given.rows();
    const auto hidden = given.hidden();
    const auto vocabulary = given.vocabulary();
    require_shape(given.input, {rows, hidden});
    require(!given.high_performance() || vocabulary >= kMinVocabulary, kParamInvalid, "weight has ", vocabulary,
            " rows; with softmaxOptional it needs 128 or more");
    require_shape(given.weight, {vocabulary, hidden});
    const auto bits = given.target_mask->numel() * (given.target_mask->dtype == ACL_BOOL ? 1 : 8);
    require(given.target_mask->dtype == ACL_BOOL ? bits == rows : bits >= rows, kParamInvalid, "targetMask has ", bits,
            " bits for ", rows, " rows");
    require_shape(given.masked_target, {rows});
    if (given.high_performance()) {
        require_shape(given.softmax, {rows, vocabulary});
    } else {
        require_shape(given.logits_max, {rows});
        require_shape(given.sum_exp_logits, {rows});
    }
    require_shape(given.input_grad, {rows, hidden});
    require_shape(given.weight_grad, {vocabulary, hidden});
}

// The block sizes of the products in the tiling with a softmax.
struct Blocks {
    std::int64_t m;
    std::int64_t n;
};

Blocks blocks_for(std::int64_t rows) {
    constexpr std::int64_t kManyRows = 23296;
    // CANN keeps the blocks for the process's life: a call with many rows, even if refused, changes all later calls.
    static std::atomic<bool> had_many_rows{false};
    if (rows >= kManyRows) had_many_rows = true;
    return had_many_rows ? Blocks{256, 128} : Blocks{128, 256};
}

void require_extent(const char* what, std::int64_t size, bool fits) {
    require(fits, kInnerNullPointer, "the tiling failed: ", what, " of ", size, " is too large");
}

// The tilings return the workspace size. Phase one reports their failures as an inner null pointer.
std::uint64_t tile_softmax(const Given& given) {
    const auto base = blocks_for(given.rows());
    const auto vocabulary = given.vocabulary();
    // A row of the softmax has to fit in the unified buffer twice.
    require_extent("V", vocabulary,
                   vocabulary <= kMaxVocabulary && round_up(4 * vocabulary, 64) <= (kUnifiedBuffer - 32) / 2);
    require_extent("H", given.hidden(), given.hidden() <= kMaxExtent);
    constexpr std::int64_t kTile = 64;
    const auto rows = round_up(given.rows(), 16);
    const auto last_tile = (rows - 1) % kTile + 1;
    require_extent("BT", given.rows(), rows - last_tile <= kMaxExtent);

    const auto wanted = divide_up(2 * cube_cores() - 1, divide_up(given.hidden(), base.n)) + 1;
    const auto useful = std::max(divide_up(given.rows(), base.m), divide_up(vocabulary, base.m));
    const auto longest = std::max(round_up(vocabulary, 16), rows);
    return static_cast<std::uint64_t>(longest * base.m * std::min(wanted, useful) * 2);
}

std::uint64_t tile_statistics(const Given& given) {
    const auto hidden = given.hidden();
    require_extent("H", hidden, hidden <= kMaxExtent);
    const auto tiles = 2 * 4 * cube_cores() * (128 * 256 + 128 * hidden + 256 * hidden);
    const auto sums = 4 * (given.rows() * hidden + given.vocabulary() * hidden);
    return static_cast<std::uint64_t>(tiles + sums);
}

Plan plan(const Given& given, float label_smoothing) {
    check_presence(given);
    check_dtypes(given);
    for_each(given, [](const Named& argument) {
        require(argument->format == ACL_FORMAT_ND, kParamInvalid, argument.name, " has format ",
                static_cast<int>(argument->format), "; only ND is supported");
    });
    require(label_smoothing == 0.0f, kParamInvalid, "labelSmoothing is ", label_smoothing, "; only 0 is supported");
    check_ranks(given);
    check_sizes(given);
    if (given.input->empty() || given.weight->empty()) return {};
    require(is_a2_or_a3(), kRuntimeError, "the operator is not supported on this chip");
    require_copyable({given.grad, given.input, given.weight, given.target_mask, given.masked_target});
    // In the mode with a softmax, the statistics are not checked.
    if (given.high_performance()) {
        require_copyable({given.softmax});
    } else {
        require_copyable({given.logits_max, given.sum_exp_logits});
    }
    Intermediates copies;
    for_each(given, [&](const Named& argument) { copies.argument(argument.layout(), argument->dtype); });
    const bool high_performance = given.high_performance();
    const auto own = high_performance ? tile_softmax(given) : tile_statistics(given);
    return {.workspace_size = copies.kernel(own).total(), .kernel = high_performance ? from_softmax : from_statistics};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnFusedLinearCrossEntropyLossGrad, kApi)
HOST_NPU_PHASE_ONE aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
    const aclTensor* grad, const aclTensor* input, const aclTensor* weight, const aclTensor* targetMask,
    const aclTensor* maskedTarget, float labelSmoothing, const aclTensor* logitsMaxOptional,
    const aclTensor* sumExpLogitsOptional, const aclTensor* softmaxOptional, aclTensor* inputGradOut,
    aclTensor* weightGradOut, std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kApi, workspaceSize, executor)
        .with(grad, input, weight, targetMask, maskedTarget, logitsMaxOptional, sumExpLogitsOptional, softmaxOptional,
              inputGradOut, weightGradOut, labelSmoothing)
        .run([&] {
            return plan({{"grad", grad},
                         {"input", input},
                         {"weight", weight},
                         {"targetMask", targetMask},
                         {"maskedTarget", maskedTarget},
                         {"logitsMaxOptional", logitsMaxOptional},
                         {"sumExpLogitsOptional", sumExpLogitsOptional},
                         {"softmaxOptional", softmaxOptional},
                         {"inputGradOut", inputGradOut},
                         {"weightGradOut", weightGradOut}},
                        labelSmoothing);
        });
}
