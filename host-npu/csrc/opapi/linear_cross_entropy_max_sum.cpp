// aclnnFusedLinearOnlineMaxSum: the statistics of the logits of one shard of the vocabulary.
#include <array>
#include <cmath>
#include <span>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/gemm.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

constexpr std::int64_t kMaxHidden = 65534;
// The number of rows of logits computed at once, a choice of the simulation.
constexpr std::int64_t kRowsAtOnce = 512;
constexpr std::int64_t kTileRows = 128;
constexpr std::int64_t kTileColumns = 256;

enum : std::size_t { kInput, kWeight, kTarget, kMax, kSum, kPredicted, kMask, kMaskedTarget, kLogits };

struct Range {
    std::int64_t start;
    std::int64_t end;

    // The kernel compares in single precision, which is exact below 2^24. `end` is exclusive.
    bool contains(std::int64_t target) const {
        const auto id = static_cast<float>(target);
        return id >= static_cast<float>(start) && id < static_cast<float>(end);
    }

    // The kernel also subtracts in single precision.
    std::int64_t place_of(std::int64_t target) const {
        return static_cast<std::int64_t>(static_cast<float>(target) - static_cast<float>(start));
    }
};

struct Row {
    float max = 0.0f;
    float sum = 0.0f;
};

// NaN counts as the largest value.
float largest(std::span<const float> logits) {
    float max = logits.front();
    for (const float logit : logits) max = logit > max || std::isnan(logit) ? logit : max;
    return max;
}

// In single precision within a tile, in vectors of 64; across tiles as exact as the device's sums.
float sum_exp(std::span<const float> logits, float max) {
    constexpr std::size_t kVector = 64;
    double total = 0;
    for (std::size_t tile = 0; tile < logits.size(); tile += kTileColumns) {
        std::array<float, kVector> lanes{};
        const auto of_tile = logits.subspan(tile, std::min<std::size_t>(kTileColumns, logits.size() - tile));
        for (std::size_t column = 0; column < of_tile.size(); ++column) {
            lanes[column % kVector] += std::exp(of_tile[column] - max);
        }
        for (auto half = kVector / 2; half > 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        }
        total += lanes.front();
    }
    return static_cast<float>(total);
}

Row reduce(std::span<const float> logits) {
    const float max = largest(logits);
    return {max, sum_exp(logits, max)};
}

// One bit per row, least significant first. Bits beyond the last row are as for a target of 0.
std::vector<std::uint8_t> pack(const std::vector<std::int64_t>& targets, const Range& range) {
    std::vector<std::uint8_t> mask((targets.size() + 7) / 8);
    for (std::size_t bit = 0; bit < mask.size() * 8; ++bit) {
        const auto target = bit < targets.size() ? targets[bit] : 0;
        if (!range.contains(target)) mask[bit / 8] |= static_cast<std::uint8_t>(1u << bit % 8);
    }
    return mask;
}

void max_sum(const KernelArguments& arguments, const Range& range) {
    const auto input = read_all<float>(arguments[kInput]);
    const auto weight = read_all<float>(arguments[kWeight]);
    const auto targets = read_all<std::int64_t>(arguments[kTarget]);
    const auto rows = arguments[kInput]->shape[0];
    const auto hidden = arguments[kInput]->shape[1];
    const auto columns = arguments[kWeight]->shape[0];

    std::vector<float> max(targets.size()), sum(targets.size()), predicted(targets.size());
    std::vector<std::int64_t> masked_target(targets.size());
    std::vector<float> logits(static_cast<std::size_t>(std::min(rows, kRowsAtOnce) * columns));
    std::optional<Elements> logits_out;
    if (arguments[kLogits]) logits_out.emplace(arguments[kLogits]);

    for (std::int64_t first = 0; first < rows; first += kRowsAtOnce) {
        const auto count = std::min(kRowsAtOnce, rows - first);
        std::fill(logits.begin(), logits.end(), 0.0f);
        multiply_add(rows_of(&input.data()[first * hidden], hidden), rows_of(weight.data(), hidden).transposed(), count,
                     columns, hidden, logits.data(), columns);
        // The device rounds logits to the input's 16 bits even if it does not return them.
        round_to(arguments[kInput]->dtype, logits.data(), count * columns);
        if (logits_out) logits_out->write(logits.data(), count * columns);
        for (std::int64_t index = 0; index < count; ++index) {
            const auto row = static_cast<std::size_t>(first + index);
            const std::span<const float> of_row(&logits[static_cast<std::size_t>(index * columns)],
                                                static_cast<std::size_t>(columns));
            const auto reduced = reduce(of_row);
            max[row] = reduced.max;
            sum[row] = reduced.sum;
            if (!range.contains(targets[row])) continue;
            const auto id = range.place_of(targets[row]);
            masked_target[row] = id;
            // With a range that ends beyond the shard, a target without a logit passes.
            predicted[row] = (id < columns ? of_row[static_cast<std::size_t>(id)] : 0.0f) - max[row];
        }
    }
    write_all(arguments[kMax], max);
    write_all(arguments[kSum], sum);
    write_all(arguments[kPredicted], predicted);
    write_all(arguments[kMask], pack(targets, range));
    write_all(arguments[kMaskedTarget], masked_target);
}

Plan plan(const Named& input, const Named& weight, const Named& target, const Range& range, const Named& max,
          const Named& sum, const Named& predicted, const Named& mask, const Named& masked_target,
          const Named& logits) {
    require_present({input, weight, target, max, sum, predicted, mask, masked_target});
    const bool keeps_logits = logits.tensor != nullptr;
    require_dtype(input, {ACL_FLOAT16, ACL_BF16});
    require_dtype(weight, {ACL_FLOAT16, ACL_BF16});
    require_same_dtype(weight, input);
    require_dtype(target, {ACL_INT32, ACL_INT64});
    for (const auto& argument : {max, sum, predicted}) require_dtype(argument, {ACL_FLOAT});
    require_dtype(mask, {ACL_UINT8});
    require_same_dtype(masked_target, target);
    if (keeps_logits) require_same_dtype(logits, input);

    require_rank(input, 2);
    require_rank(weight, 2);
    for (const auto& argument : {target, max, sum, predicted, mask, masked_target}) require_rank(argument, 1);
    if (keeps_logits) require_rank(logits, 2);
    const auto rows = input->shape[0];
    const auto hidden = input->shape[1];
    const auto columns = weight->shape[0];
    require(columns > 0, kParamInvalid, "weight has no rows");
    require(hidden <= kMaxHidden, kParamInvalid, "input's rows have ", hidden, " elements; at most 65534 are allowed");
    require_shape(weight, {columns, hidden});
    for (const auto& argument : {target, max, sum, predicted, masked_target}) require_shape(argument, {rows});
    require_shape(mask, {(rows + 7) / 8});
    if (keeps_logits) require_shape(logits, {rows, columns});
    require(range.start >= 0, kParamInvalid, "vocabStartIndex is ", range.start, "; it must not be negative");
    require(range.end >= range.start, kParamInvalid, "vocabEndIndex is ", range.end, ", before vocabStartIndex ",
            range.start);
    if (rows == 0) return {};
    require_copyable({input, weight, target});
    // Each result has the format of the corresponding input.
    for (const auto& argument : {max, sum, predicted, mask, masked_target}) {
        require_view_copy({argument->shape, argument->dtype, target->format}, argument);
    }
    if (keeps_logits) require_view_copy({logits->shape, logits->dtype, input->format}, logits);

    Plan plan{.kernel = [range](const KernelArguments& arguments) { max_sum(arguments, range); }};
    // Phase one ignores the failure of the launch.
    if (!is_a2_or_a3()) plan.launch_failure = Refusal{kFindKernelError, "this chip has no kernel of it"};
    Intermediates intermediates;
    for (const auto& argument : {input, weight, target}) intermediates.argument(argument.layout(), argument->dtype);
    const auto tasks = divide_up(rows, kTileRows) * divide_up(columns, kTileColumns);
    const auto cores = std::min(tasks, cube_cores());
    const auto staged = rows * 4 * cores * 2;
    const auto tiles = keeps_logits ? 0 : kTileRows * kTileColumns * 2 * cores * 2;
    plan.workspace_size = intermediates.kernel(static_cast<std::uint64_t>(staged + tiles)).total();
    return plan;
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnFusedLinearOnlineMaxSum, kMaxSum)
HOST_NPU_PHASE_ONE aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
    const aclTensor* input, const aclTensor* weight, const aclTensor* target, std::int64_t vocabStartIndex,
    std::int64_t vocabEndIndex, aclTensor* logitsMaxLocalOut, aclTensor* sumExpLogitsLocalOut,
    aclTensor* predictedLogitsLocalOut, aclTensor* targetMaskOut, aclTensor* maskedTargetOut,
    aclTensor* vocabParallelLogitsOutOptional, std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kMaxSum, workspaceSize, executor)
        .with(input, weight, target, logitsMaxLocalOut, sumExpLogitsLocalOut, predictedLogitsLocalOut, targetMaskOut,
              maskedTargetOut, vocabParallelLogitsOutOptional, vocabStartIndex, vocabEndIndex)
        .run([&] {
            return plan({"input", input}, {"weight", weight}, {"target", target}, {vocabStartIndex, vocabEndIndex},
                        {"logitsMaxLocalOut", logitsMaxLocalOut}, {"sumExpLogitsLocalOut", sumExpLogitsLocalOut},
                        {"predictedLogitsLocalOut", predictedLogitsLocalOut}, {"targetMaskOut", targetMaskOut},
                        {"maskedTargetOut", maskedTargetOut},
                        {"vocabParallelLogitsOutOptional", vocabParallelLogitsOutOptional});
        });
}
