// The number of cores of a device, and the limits on their use.
#include <cstdint>

#include "acl/acl.h"
#include "tests/device.h"

namespace {

using namespace test;

constexpr aclError kInvalid = 107000;

std::uint32_t cores_of_thread() {
    std::uint32_t value = 0;
    expect_equal(aclrtGetResInCurrentThread(ACL_RT_DEV_RES_CUBE_CORE, &value), 0, "the status");
    return value;
}

CASE("cores/a_device_has_24_cubes_and_48_vector_cores") {
    std::int64_t value = 0;
    expect_equal(aclrtGetDeviceInfo(0, ACL_DEV_ATTR_CUBE_CORE_NUM, &value), 0, "the status");
    expect_equal(value, 24, "the cubes");
    expect_equal(aclrtGetDeviceInfo(0, ACL_DEV_ATTR_VECTOR_CORE_NUM, &value), 0, "the status");
    expect_equal(value, 48, "the vector cores");
    expect_equal(aclGetDeviceCapability(0, ACL_DEVICE_INFO_AI_CORE_NUM, &value), 0, "status");
    expect_equal(value, 24, "the capability");
    expect(aclrtGetDeviceInfo(99, ACL_DEV_ATTR_CUBE_CORE_NUM, &value) != 0, "there is npu:99");
    recent_error();
}

CASE("cores/threads_and_streams_have_the_limit_that_is_set") {
    const auto type = ACL_RT_DEV_RES_CUBE_CORE;
    expect_equal(cores_of_thread(), 24u, "the thread's cores");
    expect_equal(aclrtSetDeviceResLimit(0, type, 12), 0, "the status");
    expect_equal(cores_of_thread(), 12u, "the thread's cores under the device's limit");
    std::uint32_t value = 0;
    expect_equal(aclrtGetDeviceResLimit(0, type, &value), 0, "the status");
    expect_equal(value, 12u, "the device's limit");
    const Stream stream;
    expect_equal(aclrtUseStreamResInCurrentThread(stream.handle), 0, "the status");
    expect_equal(cores_of_thread(), 24u, "the cores of a stream without a limit");
    expect_equal(aclrtUnuseStreamResInCurrentThread(stream.handle), 0, "the status");
    expect_equal(aclrtResetDeviceResLimit(0), 0, "the status");
    expect_equal(cores_of_thread(), 24u, "the thread's cores afterwards");
    expect_equal(aclrtSetDeviceResLimit(0, type, 25), kInvalid, "more cores than there are");
    expect_equal(aclrtSetDeviceResLimit(0, type, 0), kInvalid, "no cores");
    recent_error();
}

}  // namespace
