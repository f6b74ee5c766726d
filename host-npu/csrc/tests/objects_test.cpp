// Tensors, scalars, arrays and lists.
#include "tests/device.h"

namespace {

using namespace test;

CASE("objects/tensors") {
    const Shape shape{2, 3}, strides{1, 2}, storage{10};
    auto* const tensor =
        aclCreateTensor(shape.data(), 2, ACL_BF16, strides.data(), 4, ACL_FORMAT_NCL, storage.data(), 1, nullptr);
    std::int64_t* values = nullptr;
    std::uint64_t count = 0;
    const auto take = [&] {
        const Shape taken(values, values + count);
        delete[] values;
        return taken;
    };
    expect_equal(aclGetViewShape(tensor, &values, &count), 0, "aclGetViewShape's status");
    expect(take() == shape, "the view's shape");
    expect_equal(aclGetViewStrides(tensor, &values, &count), 0, "aclGetViewStrides' status");
    expect(take() == strides, "the strides");
    expect_equal(aclGetStorageShape(tensor, &values, &count), 0, "aclGetStorageShape's status");
    expect(take() == storage, "the storage's shape");
    std::int64_t offset = 0;
    aclFormat format = ACL_FORMAT_ND;
    aclDataType dtype = ACL_FLOAT;
    void* address = &offset;
    aclGetViewOffset(tensor, &offset);
    aclGetFormat(tensor, &format);
    aclGetDataType(tensor, &dtype);
    aclGetRawTensorAddr(tensor, &address);
    expect(offset == 4 && format == ACL_FORMAT_NCL && dtype == ACL_BF16 && address == nullptr,
           "offset, format, dtype or address");
    expect_equal(
        aclInitTensor(tensor, shape.data(), 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, storage.data(), 1, nullptr), 0,
        "aclInitTensor's status");
    aclGetViewStrides(tensor, &values, &count);
    expect(take() == Shape{3, 1}, "the default strides");
    expect_equal(aclDestroyTensor(tensor), 0, "aclDestroyTensor's status");
    expect(aclDestroyTensor(tensor) != 0, "it was destroyed twice");
    expect_equal(aclDestroyTensor(nullptr), 0, "the status of destroying null");
    expect(aclCreateTensor(nullptr, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr) == nullptr,
           "a tensor without dimensions");
    expect_equal(aclSetRawTensorAddr(nullptr, nullptr), 161001, "the status of no tensor");
    expect_equal(aclGetDataType(nullptr, &dtype), 161001, "the status of no tensor");
    recent_error();
}

CASE("objects/arrays_and_lists") {
    const std::int64_t integers[] = {1, 2, 3};
    const float reals[] = {1, 2};
    const bool flags[] = {true};
    std::uint64_t size = 9;
    auto* const ints = aclCreateIntArray(integers, 3);
    expect(aclGetIntArraySize(ints, &size) == 0 && size == 3, "the integers");
    auto* const floating = aclCreateFloatArray(reals, 2);
    expect(aclGetFloatArraySize(floating, &size) == 0 && size == 2, "the floats");
    auto* const booleans = aclCreateBoolArray(flags, 1);
    expect(aclGetBoolArraySize(booleans, &size) == 0 && size == 1, "the booleans");
    auto* const none = aclCreateIntArray(nullptr, 0);
    expect(aclGetIntArraySize(none, &size) == 0 && size == 0, "the empty array");
    expect_equal(aclDestroyIntArray(ints) + aclDestroyFloatArray(floating) + aclDestroyBoolArray(booleans) +
                     aclDestroyIntArray(none),
                 0, "the status of destroying arrays");
    float value = 2;
    expect(aclCreateScalar(nullptr, ACL_FLOAT) == nullptr, "a scalar of nothing");
    auto* const scalar = aclCreateScalar(&value, ACL_FLOAT);
    const aclScalar* const scalars[] = {scalar};
    auto* const scalar_list = aclCreateScalarList(scalars, 1);
    expect(aclGetScalarListSize(scalar_list, &size) == 0 && size == 1, "the scalars");
    expect_equal(aclDestroyScalarList(scalar_list), 0, "the status of destroying the list");
    expect(aclDestroyScalar(scalar) != 0, "the list did not destroy its scalar");
    const Shape shape{1};
    auto* const member =
        aclCreateTensor(shape.data(), 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape.data(), 1, nullptr);
    const aclTensor* const members[] = {member};
    auto* const list = aclCreateTensorList(members, 1);
    expect(aclGetTensorListSize(list, &size) == 0 && size == 1, "the tensors");
    expect_equal(aclSetDynamicTensorAddr(nullptr, 0, 0, list, &value), 561103, "the status without executor");
    void* address = nullptr;
    aclGetRawTensorAddr(member, &address);
    expect(address == &value, "the address was not stored before the executor was looked at");
    expect_equal(aclDestroyTensorList(list), 0, "the status of destroying the list");
    expect(aclDestroyTensor(member) != 0, "the list did not destroy its tensor");
    recent_error();
}

CASE("objects/set_address_refusals") {
    const auto tensor = floats({1});
    expect_equal(aclSetTensorAddr(nullptr, 0, nullptr, nullptr), 561103, "the status without tensor");
    expect_equal(AclSetInputTensorAddr(nullptr, 0, tensor, nullptr), 561103, "the status without executor");
    void* address = tensor.address();
    aclGetRawTensorAddr(tensor, &address);
    expect(address == nullptr, "the address was not stored first");
    recent_error();
}

CASE("objects/many_dimensions") {
    // The framework's limit is 25 dimensions.
    const Shape most(25, 1), too_many(26, 1);
    const Tensor tensor(ACL_FLOAT, most);
    std::int64_t* values = nullptr;
    std::uint64_t count = 0;
    aclGetViewStrides(tensor, &values, &count);
    const Shape strides(values, values + count);
    delete[] values;
    expect(strides == most, "the strides of 25 dimensions");
    expect(aclCreateTensor(too_many.data(), 26, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, too_many.data(), 26, nullptr) ==
               nullptr,
           "a tensor of 26 dimensions");
    recent_error();
}

}  // namespace
