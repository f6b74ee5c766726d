// aclnnFusedCrossEntropyLossWithMaxSum: the loss and the softmax from the statistics of the rows.
#include <cmath>
#include <stdexcept>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

enum : std::size_t { kMax, kSum, kPredicted, kLogits, kLossOut, kSoftmaxOut };

void softmax(const HostTensor& logits, const std::vector<float>& max, const std::vector<float>& sum,
             const HostTensor& out) {
    const auto rows = static_cast<std::size_t>(logits->shape[0]);
    const auto columns = logits->shape[1];
    if (rows > max.size()) throw std::out_of_range("there are more rows of logits than maxima and sums");
    Elements source(logits), destination(out);
    std::vector<float> row(static_cast<std::size_t>(columns));
    for (std::size_t index = 0; index < rows; ++index) {
        source.read(row.data(), columns);
        const float scale = 1.0f / sum[index];
        for (auto& logit : row) logit = std::exp(logit - max[index]) * scale;
        destination.write(row.data(), columns);
    }
}

void loss(const KernelArguments& arguments) {
    const auto& logits = arguments[kLogits];
    const auto sum = read_all<float>(arguments[kSum]);
    auto losses = read_all<float>(arguments[kPredicted]);
    for (std::size_t row = 0; row < losses.size(); ++row) losses[row] = std::log(sum[row]) - losses[row];
    // The cores divide the rows of the logits, if there are logits.
    auto rows = static_cast<std::int64_t>(losses.size());
    if (logits) rows = std::min(rows, logits->shape[0]);
    if (rows > 0) Elements(arguments[kLossOut]).write(losses.data(), rows);
    if (!logits || logits->empty()) return;
    softmax(logits, read_all<float>(arguments[kMax]), sum, arguments[kSoftmaxOut]);
}

// Returns the failure of the tiling, if any.
std::optional<Refusal> tiling_failure(const Named& max, const Named& logits) {
    const auto failure = [](const auto&... parts) {
        std::ostringstream text;
        text << "the tiling failed: ";
        (text << ... << parts);
        return Refusal{kTilingError, text.str()};
    };
    if (logits.tensor == nullptr) {
        if (max->empty()) return failure("there are no rows to divide between the cores");
    } else if (soc() == Soc::Ascend950) {
        if (logits->empty()) return failure("the logits have shape ", to_string(logits->shape));
        if (logits->shape[0] != max->shape[0]) {
            return failure("there are ", logits->shape[0], " rows of logits and ", max->shape[0], " maxima");
        }
    }
    return std::nullopt;
}

Plan plan(const Named& max, const Named& sum, const Named& predicted, float label_smoothing, const Named& logits,
          const Named& loss_out, const Named& softmax_out) {
    require_present({max, sum, predicted, loss_out});
    const bool has_logits = logits.tensor != nullptr;
    require(!has_logits || softmax_out.tensor != nullptr, kNullPointer,
            "softMaxOutOptional is a null pointer, but logits are given");
    for (const auto& argument : {max, sum, predicted, loss_out}) require_dtype(argument, {ACL_FLOAT});
    if (has_logits) {
        require_dtype(logits, {ACL_FLOAT, ACL_FLOAT16, ACL_BF16});
        require_dtype(softmax_out, {ACL_FLOAT});
    }
    require_rank(max, 1);
    for (const auto& argument : {sum, predicted, loss_out}) require_shape(argument, max->shape);
    if (has_logits) {
        require_rank(logits, 2);
        require_shape(softmax_out, logits->shape);
    }
    require(label_smoothing == 0.0f, kParamInvalid, "labelSmoothing is ", label_smoothing, "; only 0 is supported");
    require_copyable({max, sum, predicted, logits});

    Plan plan{.kernel = loss};
    // Phase one ignores the failure of the launch.
    plan.launch_failure = tiling_failure(max, logits);
    if (!has_bfloat16()) plan.launch_failure = Refusal{kFindKernelError, "this chip has no kernel of it"};
    Intermediates intermediates;
    for (const auto& argument : {max, sum, predicted}) intermediates.argument(argument.layout(), ACL_FLOAT);
    if (has_logits) intermediates.argument(logits.layout(), logits->dtype);
    plan.workspace_size = intermediates.kernel().total();
    return plan;
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

// inputOptional and weightOptional are reserved for a mode that does not exist.
HOST_NPU_PHASE_TWO(aclnnFusedCrossEntropyLossWithMaxSum, kLoss)
HOST_NPU_PHASE_ONE aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
    const aclTensor* logitsMax, const aclTensor* sumExpLogits, const aclTensor* predictedLogits, float labelSmoothing,
    const aclTensor*, const aclTensor*, const aclTensor* vocabParallelLogitsOptional, aclTensor* lossOut,
    aclTensor* softMaxOutOptional, std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kLoss, workspaceSize, executor)
        .with(logitsMax, sumExpLogits, predictedLogits, vocabParallelLogitsOptional, lossOut, softMaxOutOptional,
              labelSmoothing)
        .run([&] {
            return plan({"logitsMax", logitsMax}, {"sumExpLogits", sumExpLogits}, {"predictedLogits", predictedLogits},
                        labelSmoothing, {"vocabParallelLogitsOptional", vocabParallelLogitsOptional},
                        {"lossOut", lossOut}, {"softMaxOutOptional", softMaxOutOptional});
        });
}
