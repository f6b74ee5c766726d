#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "launch.h"
#include "register.h"

namespace torch_aclnn_ops {
namespace {

struct FusedLinearOnlineMaxSum : Signature<In, In, In, int64_t, int64_t, Out, Out, Out, Out, Out, Out> {
    static constexpr auto name = "fused_linear_online_max_sum";
    static constexpr auto cann = "aclnnFusedLinearOnlineMaxSum";
    static constexpr std::array parameters = {"input",
                                              "weight",
                                              "target",
                                              "vocabStartIndex",
                                              "vocabEndIndex",
                                              "logitsMaxLocalOut",
                                              "sumExpLogitsLocalOut",
                                              "predictedLogitsLocalOut",
                                              "targetMaskOut",
                                              "maskedTargetOut",
                                              "vocabParallelLogitsOutOptional"};
    // logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits
    static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> run(
        const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target, int64_t vocab_start_index,
        int64_t vocab_end_index, bool return_logits);
};

// labelSmoothing is a float; a double would be misread.
struct FusedCrossEntropyLossWithMaxSum : Signature<In, In, In, float, In, In, In, Out, Out> {
    static constexpr auto name = "fused_cross_entropy_loss_with_max_sum";
    static constexpr auto cann = "aclnnFusedCrossEntropyLossWithMaxSum";
    static constexpr std::array parameters = {"logitsMax",
                                              "sumExpLogits",
                                              "predictedLogits",
                                              "labelSmoothing",
                                              "inputOptional",
                                              "weightOptional",
                                              "vocabParallelLogitsOptional",
                                              "lossOut",
                                              "softMaxOutOptional"};
    // loss, softmax
    static std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& logits_max, const at::Tensor& sum_exp_logits,
                                                  const at::Tensor& predicted_logits,
                                                  const std::optional<at::Tensor>& logits);
};

struct FusedLinearCrossEntropyLossGrad : Signature<In, In, In, In, In, float, In, In, In, Out, Out> {
    static constexpr auto name = "fused_linear_cross_entropy_loss_grad";
    static constexpr auto cann = "aclnnFusedLinearCrossEntropyLossGrad";
    static constexpr std::array parameters = {"grad",
                                              "input",
                                              "weight",
                                              "targetMask",
                                              "maskedTarget",
                                              "labelSmoothing",
                                              "logitsMaxOptional",
                                              "sumExpLogitsOptional",
                                              "softmaxOptional",
                                              "inputGradOut",
                                              "weightGradOut"};
    // input_grad, weight_grad
    static std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& grad, const at::Tensor& input,
                                                  const at::Tensor& weight, const at::Tensor& target_mask,
                                                  const at::Tensor& masked_target,
                                                  const std::optional<at::Tensor>& logits_max,
                                                  const std::optional<at::Tensor>& sum_exp_logits,
                                                  const std::optional<at::Tensor>& softmax);
};

constexpr float kNoLabelSmoothing = 0.0F;  // the only value that CANN accepts

bool is_given(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

// CANN compares targets with the bounds of the shard in float32, which represents all integers up to this one.
constexpr int64_t kLargestShard = 1 << 24;

// Padding bits in the mask's last byte are as for a target of 0: set unless class 0 is in the shard.
void fill_last_byte(const at::Tensor& target_mask, int64_t rows, bool has_class_0) {
    if (rows % 8 != 0 && !has_class_0) {
        target_mask.select(0, rows / 8).bitwise_or_((0xFF << (rows % 8)) & 0xFF);
    }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FusedLinearOnlineMaxSum::run(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target, int64_t vocab_start_index,
    int64_t vocab_end_index, bool return_logits) {
    // CANN does not get the original bounds and targets, so it cannot check them.
    TORCH_CHECK(input.dim() > 0 && weight.dim() > 0 && vocab_start_index >= 0 && vocab_end_index >= vocab_start_index &&
                    !target.is_floating_point(),
                name, ": the arguments do not fit each other");
    const int64_t rows = input.size(0);
    // CANN would read out of bounds for a target beyond the shard's last row.
    const int64_t size = std::min(vocab_end_index - vocab_start_index, weight.size(0));
    TORCH_CHECK(size <= kLargestShard, name, ": a shard must have at most ", kLargestShard, " classes, but it has ",
                size);
    // Relative class indices, so that only the shard's size must be exact in float32.
    const at::Tensor relative_target = vocab_start_index == 0 ? target : target.sub(vocab_start_index);
    const at::TensorOptions wide = input.options().dtype(at::kFloat);
    at::Tensor logits_max = make_output({rows}, wide);
    at::Tensor sum_exp_logits = make_output({rows}, wide);
    at::Tensor predicted_logits = make_output({rows}, wide);
    at::Tensor target_mask = make_output({(rows + 7) / 8}, input.options().dtype(at::kByte));
    at::Tensor masked_target = make_output({rows}, target.options());
    at::Tensor logits = return_logits ? make_output({rows, weight.size(0)}, input.options()) : at::Tensor();
    launch<FusedLinearOnlineMaxSum>(input, weight, relative_target, int64_t{0}, size, logits_max, sum_exp_logits,
                                    predicted_logits, target_mask, masked_target, logits);
    fill_last_byte(target_mask, rows, vocab_start_index == 0 && vocab_end_index > 0);
    return {std::move(logits_max),       std::move(sum_exp_logits),
            std::move(predicted_logits), std::move(target_mask),
            std::move(masked_target),    return_logits ? logits : make_output({0}, input.options())};
}

std::tuple<at::Tensor, at::Tensor> FusedCrossEntropyLossWithMaxSum::run(const at::Tensor& logits_max,
                                                                        const at::Tensor& sum_exp_logits,
                                                                        const at::Tensor& predicted_logits,
                                                                        const std::optional<at::Tensor>& logits) {
    const bool has_logits = is_given(logits);
    // CANN does not compare these two.
    TORCH_CHECK(!has_logits || (logits->dim() > 0 && logits_max.dim() > 0 && logits->size(0) == logits_max.size(0)),
                name, ": logits and logits_max must have the same number of rows");
    at::Tensor loss = make_output(logits_max.sizes(), logits_max.options());
    at::Tensor softmax = has_logits ? make_output(logits->sizes(), logits_max.options()) : at::Tensor();
    if (loss.numel() > 0) {
        launch<FusedCrossEntropyLossWithMaxSum>(logits_max, sum_exp_logits, predicted_logits, kNoLabelSmoothing,
                                                nullptr, nullptr, logits, loss, softmax);
    } else {
        // CANN divides by the number of rows.
        check_in_python(name, {logits_max, sum_exp_logits, predicted_logits, logits}, false);
    }
    return {std::move(loss), has_logits ? softmax : make_output({0}, logits_max.options())};
}

std::tuple<at::Tensor, at::Tensor> FusedLinearCrossEntropyLossGrad::run(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target_mask,
    const at::Tensor& masked_target, const std::optional<at::Tensor>& logits_max,
    const std::optional<at::Tensor>& sum_exp_logits, const std::optional<at::Tensor>& softmax) {
    // CANN writes nothing if input or weight is empty, though the other's gradient may have elements: zeros.
    const bool is_empty = input.numel() == 0 || weight.numel() == 0;
    at::Tensor input_grad =
        is_empty ? at::zeros(input.sizes(), input.options()) : make_output(input.sizes(), input.options());
    at::Tensor weight_grad =
        is_empty ? at::zeros(weight.sizes(), weight.options()) : make_output(weight.sizes(), weight.options());
    if (is_given(softmax)) {
        // With a softmax CANN writes at the target's column without checking its range.
        const at::Tensor safe_target = weight.numel() == 0 ? masked_target : masked_target.clamp(0, weight.size(0) - 1);
        launch<FusedLinearCrossEntropyLossGrad>(grad, input, weight, target_mask, safe_target, kNoLabelSmoothing,
                                                nullptr, nullptr, InPlace{*softmax}, input_grad, weight_grad);
        softmax->unsafeGetTensorImpl()->bump_version();
    } else {
        launch<FusedLinearCrossEntropyLossGrad>(grad, input, weight, target_mask, masked_target, kNoLabelSmoothing,
                                                logits_max, sum_exp_logits, nullptr, input_grad, weight_grad);
    }
    return {std::move(input_grad), std::move(weight_grad)};
}

const Register<FusedLinearOnlineMaxSum> fused_linear_online_max_sum;
const Register<FusedCrossEntropyLossWithMaxSum> fused_cross_entropy_loss_with_max_sum;
const Register<FusedLinearCrossEntropyLossGrad> fused_linear_cross_entropy_loss_grad;
}  // namespace

}  // namespace torch_aclnn_ops
