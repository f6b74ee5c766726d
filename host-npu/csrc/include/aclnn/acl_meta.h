// The common aclnn interface: tensors, scalars, arrays, lists and executors. C++ only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "acl/acl_base.h"

#ifndef ACLNN_API
#define ACLNN_API __attribute__((visibility("default")))
#endif

typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclTensorList aclTensorList;
typedef struct aclScalarList aclScalarList;
typedef struct aclOpExecutor aclOpExecutor;
typedef std::int32_t aclnnStatus;

extern "C" {

// Creates a view of `viewDimsNum` dimensions of the storage at `tensorData`; `offset` is in elements. Without strides,
// the view is contiguous. Dimensions are copied; the caller keeps the storage.
ACLNN_API aclTensor* aclCreateTensor(const std::int64_t* viewDims, std::uint64_t viewDimsNum, aclDataType dataType,
                                     const std::int64_t* stride, std::int64_t offset, aclFormat format,
                                     const std::int64_t* storageDims, std::uint64_t storageDimsNum, void* tensorData);
// Reinitializes an existing tensor as aclCreateTensor would.
ACLNN_API aclnnStatus aclInitTensor(aclTensor* tensor, const std::int64_t* viewDims, std::uint64_t viewDimsNum,
                                    aclDataType dataType, const std::int64_t* stride, std::int64_t offset,
                                    aclFormat format, const std::int64_t* storageDims, std::uint64_t storageDimsNum,
                                    void* tensorData);
ACLNN_API aclScalar* aclCreateScalar(void* value, aclDataType dataType);
ACLNN_API aclIntArray* aclCreateIntArray(const std::int64_t* value, std::uint64_t size);
ACLNN_API aclFloatArray* aclCreateFloatArray(const float* value, std::uint64_t size);
ACLNN_API aclBoolArray* aclCreateBoolArray(const bool* value, std::uint64_t size);
// A list owns its members and destroys them.
ACLNN_API aclTensorList* aclCreateTensorList(const aclTensor* const* value, std::uint64_t size);
ACLNN_API aclScalarList* aclCreateScalarList(const aclScalar* const* value, std::uint64_t size);

ACLNN_API aclnnStatus aclDestroyTensor(const aclTensor* tensor);
ACLNN_API aclnnStatus aclDestroyScalar(const aclScalar* scalar);
ACLNN_API aclnnStatus aclDestroyIntArray(const aclIntArray* array);
ACLNN_API aclnnStatus aclDestroyFloatArray(const aclFloatArray* array);
ACLNN_API aclnnStatus aclDestroyBoolArray(const aclBoolArray* array);
ACLNN_API aclnnStatus aclDestroyTensorList(const aclTensorList* list);
ACLNN_API aclnnStatus aclDestroyScalarList(const aclScalarList* list);

// The caller frees the arrays that these three allocate with delete[].
ACLNN_API aclnnStatus aclGetViewShape(const aclTensor* tensor, std::int64_t** viewDims, std::uint64_t* viewDimsNum);
ACLNN_API aclnnStatus aclGetStorageShape(const aclTensor* tensor, std::int64_t** storageDims,
                                         std::uint64_t* storageDimsNum);
ACLNN_API aclnnStatus aclGetViewStrides(const aclTensor* tensor, std::int64_t** stridesValue,
                                        std::uint64_t* stridesNum);
ACLNN_API aclnnStatus aclGetViewOffset(const aclTensor* tensor, std::int64_t* offset);
ACLNN_API aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format);
ACLNN_API aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType);
ACLNN_API aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr);
// Must not be called between the two phases of a call.
ACLNN_API aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* addr);

ACLNN_API aclnnStatus aclGetIntArraySize(const aclIntArray* array, std::uint64_t* size);
ACLNN_API aclnnStatus aclGetFloatArraySize(const aclFloatArray* array, std::uint64_t* size);
ACLNN_API aclnnStatus aclGetBoolArraySize(const aclBoolArray* array, std::uint64_t* size);
ACLNN_API aclnnStatus aclGetTensorListSize(const aclTensorList* list, std::uint64_t* size);
ACLNN_API aclnnStatus aclGetScalarListSize(const aclScalarList* list, std::uint64_t* size);

// Keeps an executor after phase two, so that it can run again until it is destroyed.
ACLNN_API aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor);
ACLNN_API aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor);

// Changes the storage of a tensor of a repeatable executor.
ACLNN_API aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* addr);
ACLNN_API aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* addr);
ACLNN_API aclnnStatus aclSetTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* addr);
ACLNN_API aclnnStatus aclSetDynamicInputTensorAddr(aclOpExecutor* executor, std::size_t irIndex,
                                                   std::size_t relativeIndex, aclTensorList* tensors, void* addr);
ACLNN_API aclnnStatus aclSetDynamicOutputTensorAddr(aclOpExecutor* executor, std::size_t irIndex,
                                                    std::size_t relativeIndex, aclTensorList* tensors, void* addr);
ACLNN_API aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor* executor, std::size_t irIndex, std::size_t relativeIndex,
                                              aclTensorList* tensors, void* addr);
// The six functions above under the names of older releases.
ACLNN_API decltype(aclSetInputTensorAddr) AclSetInputTensorAddr;
ACLNN_API decltype(aclSetOutputTensorAddr) AclSetOutputTensorAddr;
ACLNN_API decltype(aclSetTensorAddr) AclSetTensorAddr;
ACLNN_API decltype(aclSetDynamicInputTensorAddr) AclSetDynamicInputTensorAddr;
ACLNN_API decltype(aclSetDynamicOutputTensorAddr) AclSetDynamicOutputTensorAddr;
ACLNN_API decltype(aclSetDynamicTensorAddr) AclSetDynamicTensorAddr;

// Succeeds without effect: the simulation keeps no dumps.
ACLNN_API aclnnStatus aclDumpOpTensors(const char* opType, const char* opName, aclTensor** tensors,
                                       std::size_t inputTensorNum, std::size_t outputTensorNum, aclrtStream stream);
}
