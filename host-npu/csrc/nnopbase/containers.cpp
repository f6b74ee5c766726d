// aclScalar, arrays and lists.
#include "nnopbase/containers.h"

#include <complex>
#include <cstring>
#include <memory>
#include <vector>

#include "nnopbase/dtype.h"
#include "nnopbase/pool.h"
#include "nnopbase/status.h"
#include "nnopbase/tensor.h"

struct aclScalarList {
    bool alive = false;
    std::uint64_t generation = 0;
    std::vector<aclScalar*> members;
};

namespace host_npu {
namespace {

template <class Handle>
constexpr const char* kKind = nullptr;
template <>
constexpr const char* kKind<aclScalar> = "aclScalar";
template <>
constexpr const char* kKind<aclIntArray> = "aclIntArray";
template <>
constexpr const char* kKind<aclFloatArray> = "aclFloatArray";
template <>
constexpr const char* kKind<aclBoolArray> = "aclBoolArray";
template <>
constexpr const char* kKind<aclTensorList> = "aclTensorList";
template <>
constexpr const char* kKind<aclScalarList> = "aclScalarList";

template <class Handle>
Pool<Handle>& pool() {
    static auto& handles = *new Pool<Handle>(kKind<Handle>);
    return handles;
}

template <class Handle, class Value>
Handle* create_array(const char* function, const Value* values, std::uint64_t size) {
    if (injected_failure(function)) return nullptr;
    if (values == nullptr) size = 0;
    using Values = decltype(Handle::values);
    if (size > Values().max_size()) {
        failed(kParamInvalid, function, "no memory has " + std::to_string(size) + " elements");
        return nullptr;
    }
    auto* const array = pool<Handle>().take();
    array->values.assign(values, values + size);
    return array;
}

template <class Handle, class Member>
Handle* create_list(const char* function, const Member* const* members, std::uint64_t size) {
    if (injected_failure(function)) return nullptr;
    auto* const list = pool<Handle>().take();
    list->members.clear();
    for (std::uint64_t index = 0; members != nullptr && index < size; ++index) {
        list->members.push_back(const_cast<Member*>(members[index]));
    }
    return list;
}

template <class Handle>
aclnnStatus destroy(const char* function, const Handle* handle) {
    return unless_it_fails(function, [&] {
        if (handle == nullptr || pool<Handle>().give_back(const_cast<Handle*>(handle))) return kSuccess;
        return failed(kInnerError, function, "the object was destroyed before");
    });
}

template <class Handle, class Member>
aclnnStatus destroy_list(const char* function, const Handle* list, aclnnStatus (*destroy_member)(const Member*)) {
    const auto members = list != nullptr && list->alive ? list->members : std::vector<Member*>();
    if (const auto status = destroy(function, list); status != kSuccess) return status;
    for (const auto* member : members) {
        if (const auto status = destroy_member(member); status != kSuccess) return status;
    }
    return kSuccess;
}

template <class Handle>
aclnnStatus get_size(const char* function, const Handle* handle, std::uint64_t* size) {
    return unless_it_fails(function, [&] {
        if (handle == nullptr || size == nullptr) {
            return failed(kNullPointer, function, "an argument is a null pointer");
        }
        if constexpr (requires { handle->values; }) {
            *size = handle->values.size();
        } else {
            *size = handle->members.size();
        }
        return kSuccess;
    });
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

aclScalar* aclCreateScalar(void* value, aclDataType dataType) {
    const auto size = item_size(dataType);
    if (injected_failure(__func__) || value == nullptr || size == 0) return nullptr;
    auto* const scalar = pool<aclScalar>().take();
    scalar->dtype = dataType;
    std::memcpy(scalar->value.data(), value, size);
    return scalar;
}

aclIntArray* aclCreateIntArray(const std::int64_t* value, std::uint64_t size) {
    return create_array<aclIntArray>(__func__, value, size);
}
aclFloatArray* aclCreateFloatArray(const float* value, std::uint64_t size) {
    return create_array<aclFloatArray>(__func__, value, size);
}
aclBoolArray* aclCreateBoolArray(const bool* value, std::uint64_t size) {
    return create_array<aclBoolArray>(__func__, value, size);
}
aclTensorList* aclCreateTensorList(const aclTensor* const* value, std::uint64_t size) {
    return create_list<aclTensorList>(__func__, value, size);
}
aclScalarList* aclCreateScalarList(const aclScalar* const* value, std::uint64_t size) {
    return create_list<aclScalarList>(__func__, value, size);
}

aclnnStatus aclDestroyScalar(const aclScalar* scalar) { return destroy(__func__, scalar); }
aclnnStatus aclDestroyIntArray(const aclIntArray* array) { return destroy(__func__, array); }
aclnnStatus aclDestroyFloatArray(const aclFloatArray* array) { return destroy(__func__, array); }
aclnnStatus aclDestroyBoolArray(const aclBoolArray* array) { return destroy(__func__, array); }
aclnnStatus aclDestroyTensorList(const aclTensorList* list) { return destroy_list(__func__, list, aclDestroyTensor); }
aclnnStatus aclDestroyScalarList(const aclScalarList* list) { return destroy_list(__func__, list, aclDestroyScalar); }

aclnnStatus aclGetIntArraySize(const aclIntArray* array, std::uint64_t* size) {
    return get_size(__func__, array, size);
}
aclnnStatus aclGetFloatArraySize(const aclFloatArray* array, std::uint64_t* size) {
    return get_size(__func__, array, size);
}
aclnnStatus aclGetBoolArraySize(const aclBoolArray* array, std::uint64_t* size) {
    return get_size(__func__, array, size);
}
aclnnStatus aclGetTensorListSize(const aclTensorList* list, std::uint64_t* size) {
    return get_size(__func__, list, size);
}
aclnnStatus aclGetScalarListSize(const aclScalarList* list, std::uint64_t* size) {
    return get_size(__func__, list, size);
}
