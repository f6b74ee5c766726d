// The functions of aclTensor.
#include "nnopbase/tensor.h"

#include <exception>
#include <string>

#include "nnopbase/pool.h"
#include "nnopbase/status.h"

namespace host_npu {
namespace {

Pool<aclTensor>& tensors() {
    static auto& pool = *new Pool<aclTensor>("aclTensor");
    return pool;
}

struct Description {
    const std::int64_t* view_dims;
    std::uint64_t view_dims_num;
    aclDataType dtype;
    const std::int64_t* strides;
    std::int64_t offset;
    aclFormat format;
    const std::int64_t* storage_dims;
    std::uint64_t storage_dims_num;
    void* storage;

    bool complete() const {
        return (view_dims != nullptr || view_dims_num == 0) && (storage_dims != nullptr || storage_dims_num == 0);
    }

    void describe(aclTensor& tensor) const {
        auto& layout = tensor.layout;
        layout.shape = Dims(std::span(view_dims, view_dims_num));
        layout.strides =
            strides == nullptr ? contiguous_strides(layout.shape) : Dims(std::span(strides, view_dims_num));
        layout.storage_shape = Dims(std::span(storage_dims, storage_dims_num));
        layout.offset = offset;
        layout.dtype = dtype;
        layout.format = format;
        tensor.storage = storage;
    }
};

// Returns a copy that the caller frees with delete[].
aclnnStatus copy_out(const char* function, const aclTensor* tensor, Dims Layout::* dims, std::int64_t** values,
                     std::uint64_t* count) {
    return unless_it_fails(function, [&] {
        if (tensor == nullptr || values == nullptr || count == nullptr) {
            return failed(kNullPointer, function, "an argument is a null pointer");
        }
        const Dims& from = tensor->layout.*dims;
        *values = new std::int64_t[from.rank()];
        std::copy(from.begin(), from.end(), *values);
        *count = from.rank();
        return kSuccess;
    });
}

template <class Value>
aclnnStatus get(const char* function, const aclTensor* tensor, Value* to, Value (*read)(const aclTensor&)) {
    return unless_it_fails(function, [&] {
        if (tensor == nullptr || to == nullptr) return failed(kNullPointer, function, "an argument is a null pointer");
        *to = read(*tensor);
        return kSuccess;
    });
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

aclTensor* aclCreateTensor(const std::int64_t* viewDims, std::uint64_t viewDimsNum, aclDataType dataType,
                           const std::int64_t* stride, std::int64_t offset, aclFormat format,
                           const std::int64_t* storageDims, std::uint64_t storageDimsNum, void* tensorData) {
    const Description description{viewDims, viewDimsNum, dataType,       stride,    offset,
                                  format,   storageDims, storageDimsNum, tensorData};
    if (injected_failure(__func__) || !description.complete()) return nullptr;
    auto* const tensor = tensors().take();
    try {
        description.describe(*tensor);
        return tensor;
    } catch (const std::exception& error) {
        tensors().give_back(tensor);
        failed(kParamInvalid, __func__, error.what());
        return nullptr;
    }
}

aclnnStatus aclInitTensor(aclTensor* tensor, const std::int64_t* viewDims, std::uint64_t viewDimsNum,
                          aclDataType dataType, const std::int64_t* stride, std::int64_t offset, aclFormat format,
                          const std::int64_t* storageDims, std::uint64_t storageDimsNum, void* tensorData) {
    const Description description{viewDims, viewDimsNum, dataType,       stride,    offset,
                                  format,   storageDims, storageDimsNum, tensorData};
    return unless_it_fails(__func__, [&, function = __func__] {
        if (tensor == nullptr || !description.complete()) {
            return failed(kNullPointer, function, "an argument is a null pointer");
        }
        try {
            description.describe(*tensor);
            return kSuccess;
        } catch (const std::exception& error) {
            return failed(kParamInvalid, function, error.what());
        }
    });
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
    return unless_it_fails(__func__, [tensor, function = __func__] {
        if (tensor == nullptr || tensors().give_back(const_cast<aclTensor*>(tensor))) return kSuccess;
        return failed(kInnerError, function, "the tensor was destroyed before");
    });
}

aclnnStatus aclGetViewShape(const aclTensor* tensor, std::int64_t** viewDims, std::uint64_t* viewDimsNum) {
    return copy_out(__func__, tensor, &Layout::shape, viewDims, viewDimsNum);
}

aclnnStatus aclGetStorageShape(const aclTensor* tensor, std::int64_t** storageDims, std::uint64_t* storageDimsNum) {
    return copy_out(__func__, tensor, &Layout::storage_shape, storageDims, storageDimsNum);
}

aclnnStatus aclGetViewStrides(const aclTensor* tensor, std::int64_t** stridesValue, std::uint64_t* stridesNum) {
    return copy_out(__func__, tensor, &Layout::strides, stridesValue, stridesNum);
}

aclnnStatus aclGetViewOffset(const aclTensor* tensor, std::int64_t* offset) {
    return get<std::int64_t>(__func__, tensor, offset, [](const aclTensor& of) { return of.layout.offset; });
}

aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format) {
    return get<aclFormat>(__func__, tensor, format, [](const aclTensor& of) { return of.layout.format; });
}

aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType) {
    return get<aclDataType>(__func__, tensor, dataType, [](const aclTensor& of) { return of.layout.dtype; });
}

aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr) {
    return get<void*>(__func__, tensor, addr, [](const aclTensor& of) { return of.storage; });
}

aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* addr) {
    return unless_it_fails(__func__, [=, function = __func__] {
        if (tensor == nullptr) return failed(kNullPointer, function, "tensor is a null pointer");
        tensor->storage = addr;
        return kSuccess;
    });
}
