// The kernels of torch.ops.torch_aclnn_ops.* for npu tensors. torch_aclnn_ops/ops/*.py has their schemas and formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace torch_aclnn_ops {

struct MseLossBackward {
    static constexpr auto name = "mse_loss_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          int64_t reduction);
};

struct BinaryCrossEntropyBackward {
    static constexpr auto name = "binary_cross_entropy_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
                          const std::optional<at::Tensor>& weight, int64_t reduction);
};

struct EmbeddingDenseBackward {
    static constexpr auto name = "embedding_dense_backward";
    static at::Tensor run(const at::Tensor& grad_output, const at::Tensor& indices, int64_t num_weights,
                          int64_t padding_idx, bool scale_grad_by_freq);
};

struct FusedLinearOnlineMaxSum {
    static constexpr auto name = "fused_linear_online_max_sum";
    // logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits
    static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> run(
        const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target, int64_t vocab_start_index,
        int64_t vocab_end_index, bool return_logits);
};

struct FusedCrossEntropyLossWithMaxSum {
    static constexpr auto name = "fused_cross_entropy_loss_with_max_sum";
    // loss, softmax
    static std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& logits_max, const at::Tensor& sum_exp_logits,
                                                  const at::Tensor& predicted_logits,
                                                  const std::optional<at::Tensor>& logits);
};

struct FusedLinearCrossEntropyLossGrad {
    static constexpr auto name = "fused_linear_cross_entropy_loss_grad";
    // input_grad, weight_grad
    static std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& grad, const at::Tensor& input,
                                                  const at::Tensor& weight, const at::Tensor& target_mask,
                                                  const at::Tensor& masked_target,
                                                  const std::optional<at::Tensor>& logits_max,
                                                  const std::optional<at::Tensor>& sum_exp_logits,
                                                  const std::optional<at::Tensor>& softmax);
};

struct ApplyFusedEmaAdam {
    static constexpr auto name = "apply_fused_ema_adam_";
    static void run(const at::Tensor& grad, const at::Tensor& var, const at::Tensor& m, const at::Tensor& v,
                    const at::Tensor& s, const at::Tensor& step, double lr, double ema_decay, double beta1,
                    double beta2, double eps, int64_t weight_decay_mode, bool bias_correction, double weight_decay);
};

}  // namespace torch_aclnn_ops
