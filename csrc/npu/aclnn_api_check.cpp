// Compares aclnn_api.h with CANN's own headers, where a toolkit is on the include path; else there is nothing to do.
#include <type_traits>

#include "aclnn_api.h"

#if __has_include(<aclnn/acl_meta.h>)
#include <aclnn/acl_meta.h>
static_assert(std::is_same_v<decltype(aclCreateTensor), torch_aclnn_ops::aclnn::CreateTensor>);
static_assert(std::is_same_v<decltype(aclDestroyTensor), torch_aclnn_ops::aclnn::DestroyTensor>);
static_assert(std::is_same_v<decltype(aclDestroyAclOpExecutor), torch_aclnn_ops::aclnn::DestroyExecutor>);
#endif

// A function's name cannot be a template argument without its header, hence a macro.
#define CHECK_SIGNATURE(operator)                                                              \
    static_assert(std::is_same_v < decltype(aclnn##operator##GetWorkspaceSize),                \
                  torch_aclnn_ops::aclnn::operator ::PhaseOne>,                                \
                  "aclnn" #operator"GetWorkspaceSize has another signature in this CANN");     \
    static_assert(std::is_same_v<decltype(aclnn##operator), torch_aclnn_ops::aclnn::PhaseTwo>, \
                  "aclnn" #operator" has another signature in this CANN")

#if __has_include(<aclnnop/aclnn_mse_loss_backward.h>)
#include <aclnnop/aclnn_mse_loss_backward.h>
CHECK_SIGNATURE(MseLossBackward);
#endif
#if __has_include(<aclnnop/aclnn_binary_cross_entropy_backward.h>)
#include <aclnnop/aclnn_binary_cross_entropy_backward.h>
CHECK_SIGNATURE(BinaryCrossEntropyBackward);
#endif
#if __has_include(<aclnnop/aclnn_embedding_dense_backward.h>)
#include <aclnnop/aclnn_embedding_dense_backward.h>
CHECK_SIGNATURE(EmbeddingDenseBackward);
#endif
#if __has_include(<aclnnop/aclnn_fused_linear_online_max_sum.h>)
#include <aclnnop/aclnn_fused_linear_online_max_sum.h>
CHECK_SIGNATURE(FusedLinearOnlineMaxSum);
#endif
#if __has_include(<aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h>)
#include <aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h>
CHECK_SIGNATURE(FusedCrossEntropyLossWithMaxSum);
#endif
#if __has_include(<aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h>)
#include <aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h>
CHECK_SIGNATURE(FusedLinearCrossEntropyLossGrad);
#endif
#if __has_include(<aclnnop/aclnn_apply_fused_ema_adam.h>)
#include <aclnnop/aclnn_apply_fused_ema_adam.h>
CHECK_SIGNATURE(ApplyFusedEmaAdam);
#endif
