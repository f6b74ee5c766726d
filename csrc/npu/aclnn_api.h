// The part of CANN's API that the extension uses: signatures of operators and functions of the base API.
//
// CANN's headers are not needed to build: signatures are written from CANN's documentation, each in the operator's own
// file, and aclnn_api_check.py compares them with CANN's headers if a toolkit is installed.
#pragma once

#include <acl/acl_base.h>

#include <array>
#include <cstdint>
#include <tuple>

struct aclTensor;
struct aclScalar;
struct aclOpExecutor;

namespace torch_aclnn_ops::aclnn {

using Status = int32_t;

constexpr Status kSuccess = 0;

// Phase two has one signature for all operators.
using PhaseTwo = Status(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream);

// The base API. The destroy functions accept null pointers.
using CreateTensor = aclTensor*(const int64_t* view_sizes, uint64_t view_rank, aclDataType dtype,
                                const int64_t* strides, int64_t offset, aclFormat format, const int64_t* storage_sizes,
                                uint64_t storage_rank, void* storage);
using DestroyTensor = Status(const aclTensor*);
using CreateScalar = aclScalar*(void* value, aclDataType dtype);
using DestroyScalar = Status(const aclScalar*);
using DestroyExecutor = Status(aclOpExecutor*);

}  // namespace torch_aclnn_ops::aclnn

namespace torch_aclnn_ops {

using In = const aclTensor*;
using Out = aclTensor*;
using Scalar = const aclScalar*;

// The base class of an operator: the C types of the parameters of CANN's phase one. The operator also has the
// function's name, `cann`, and the parameters' names, so that launch() checks the types of a call at compile time.
template <class... Types>
struct Signature {
    using Parameters = std::tuple<Types...>;
    using PhaseOne = aclnn::Status(Types..., uint64_t* workspace_size, aclOpExecutor** executor);
};

}  // namespace torch_aclnn_ops
