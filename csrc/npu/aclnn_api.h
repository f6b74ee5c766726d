// The aclnn functions that this extension calls, and the part of CANN's base API that it needs.
//
// CANN's headers are not needed to build: the signatures stand here, written from the operators' documents, and
// aclnn_api_check.cpp compares them with CANN's own where a toolkit is installed. Each operator is a type that names
// its parameters, so that launch() can check the C++ types of a call against the C signature when it is compiled.
#pragma once

#include <acl/acl_base.h>

#include <array>
#include <cstdint>
#include <tuple>

struct aclTensor;
struct aclOpExecutor;

namespace torch_aclnn_ops::aclnn {

using Status = int32_t;

constexpr Status kSuccess = 0;

// Phase two has one signature for all operators.
using PhaseTwo = Status(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream);

template <class... Types>
struct Signature {
    using Parameters = std::tuple<Types...>;
    using PhaseOne = Status(Types..., uint64_t* workspace_size, aclOpExecutor** executor);
};

using In = const aclTensor*;
using Out = aclTensor*;

struct MseLossBackward : Signature<In, In, In, int64_t, Out> {
    static constexpr auto name = "aclnnMseLossBackward";
    static constexpr std::array parameters = {"gradOutput", "self", "target", "reduction", "out"};
};

struct BinaryCrossEntropyBackward : Signature<In, In, In, In, int64_t, Out> {
    static constexpr auto name = "aclnnBinaryCrossEntropyBackward";
    static constexpr std::array parameters = {"gradOutput", "self", "target", "weightOptional", "reduction", "out"};
};

// The output is const here, and both counts are unsigned.
struct EmbeddingDenseBackward : Signature<In, In, uint64_t, uint64_t, bool, In> {
    static constexpr auto name = "aclnnEmbeddingDenseBackward";
    static constexpr std::array parameters = {"grad", "indices", "numWeights", "paddingIdx", "scaleGradByFreq", "out"};
};

struct FusedLinearOnlineMaxSum : Signature<In, In, In, int64_t, int64_t, Out, Out, Out, Out, Out, Out> {
    static constexpr auto name = "aclnnFusedLinearOnlineMaxSum";
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
};

// labelSmoothing is a float; a double in its place would be read as another number.
struct FusedCrossEntropyLossWithMaxSum : Signature<In, In, In, float, In, In, In, Out, Out> {
    static constexpr auto name = "aclnnFusedCrossEntropyLossWithMaxSum";
    static constexpr std::array parameters = {"logitsMax",
                                              "sumExpLogits",
                                              "predictedLogits",
                                              "labelSmoothing",
                                              "inputOptional",
                                              "weightOptional",
                                              "vocabParallelLogitsOptional",
                                              "lossOut",
                                              "softMaxOutOptional"};
};

struct FusedLinearCrossEntropyLossGrad : Signature<In, In, In, In, In, float, In, In, In, Out, Out> {
    static constexpr auto name = "aclnnFusedLinearCrossEntropyLossGrad";
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
};

// All factors are doubles, though the kernel computes in float.
struct ApplyFusedEmaAdam
    : Signature<In, Out, Out, Out, Out, In, double, double, double, double, double, int64_t, bool, double> {
    static constexpr auto name = "aclnnApplyFusedEmaAdam";
    static constexpr std::array parameters = {"grad", "varRef", "mRef",           "vRef",       "sRef",
                                              "step", "lr",     "emaDecay",       "beta1",      "beta2",
                                              "eps",  "mode",   "biasCorrection", "weightDecay"};
};

// The base API. Destroying null is allowed.
using CreateTensor = aclTensor*(const int64_t* view_sizes, uint64_t view_rank, aclDataType dtype,
                                const int64_t* strides, int64_t offset, aclFormat format, const int64_t* storage_sizes,
                                uint64_t storage_rank, void* storage);
using DestroyTensor = Status(const aclTensor*);
using DestroyExecutor = Status(aclOpExecutor*);

}  // namespace torch_aclnn_ops::aclnn
