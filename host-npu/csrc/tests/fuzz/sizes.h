// Calls of the runtime's functions that take sizes, and of Identity.
#pragma once

#include <cstddef>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "tests/fuzz/device.h"
#include "tests/fuzz/input.h"

namespace fuzz {

inline std::size_t size_of(Input& input) { return static_cast<std::size_t>(input.integer()); }

// Memory of any size, but for those that the host would have to find.
inline void allocate(Input& input) {
    const auto kind = input.byte() % 4;
    const auto size = size_of(input);
    if (size > std::size_t{1} << 20 && size < std::size_t{1} << 40) return;
    void* address = nullptr;
    aclrtDrvMemHandle handle = nullptr;
    aclrtPhysicalMemProp properties{};
    properties.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
    if (kind == 0 && aclrtMalloc(&address, size, ACL_MEM_MALLOC_HUGE_FIRST) == 0) aclrtFree(address);
    if (kind == 1 && aclrtMallocAlign32(&address, size, ACL_MEM_MALLOC_HUGE_FIRST) == 0) aclrtFree(address);
    if (kind == 2 && aclrtMallocHost(&address, size) == 0) aclrtFreeHost(address);
    if (kind == 3 && aclrtMallocPhysical(&handle, size, &properties, 0) == 0) aclrtFreePhysical(handle);
}

inline void map(Input& input) {
    void* address = nullptr;
    aclrtDrvMemHandle handle = nullptr;
    aclrtPhysicalMemProp properties{};
    properties.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
    const auto size = size_of(input);
    if (aclrtReserveMemAddress(&address, size, size_of(input), nullptr, 0) != 0) return;
    require(aclrtMallocPhysical(&handle, 1 << 16, &properties, 0) == 0, "no physical memory");
    auto* const start = static_cast<char*>(address) + input.byte() * 4096;
    const auto mapped = size_of(input);
    if (aclrtMapMem(start, mapped, size_of(input), handle, 0) == 0) aclrtUnmapMem(start);
    aclrtFreePhysical(handle);
    require(aclrtReleaseMemAddress(address) == 0, "the addresses are still in use");
}

// Copies and fills between two tensors' memories.
inline void copy(Input& input) {
    const auto& device = Device::instance();
    auto* const to = static_cast<char*>(device.tensors[0].address()) + input.byte();
    const auto* const from = static_cast<const char*>(device.tensors[1].address()) + input.byte();
    const auto kind = input.byte() % 4;
    const auto one = size_of(input), two = size_of(input), three = size_of(input), four = size_of(input);
    constexpr auto side = ACL_MEMCPY_DEVICE_TO_DEVICE;
    if (kind == 0) aclrtMemcpy(to, one, from, two, side);
    if (kind == 1) aclrtMemcpy2d(to, one, from, two, three, four, side);
    if (kind == 2) aclrtMemcpy2dAsync(to, one, from, two, three, four, side, device.stream.handle);
    if (kind == 3) aclrtMemset(to, one, 7, two);
    device.stream.wait();
}

inline test::Shape sizes(Input& input) {
    test::Shape all(input.byte() % 8);
    for (auto& size : all) size = input.integer();
    return all;
}

// A tensor of a shape whose memory has another one, as its format has it.
inline aclTensorDesc* descriptor(Input& input, const test::Shape& shape) {
    auto* const made = aclCreateTensorDesc(ACL_FLOAT, static_cast<int>(shape.size()), shape.data(), ACL_FORMAT_ND);
    if ((input.byte() & 1) == 0) return made;
    const auto storage = sizes(input);
    aclSetTensorFormat(made, ACL_FORMAT_FRACTAL_NZ);
    aclSetTensorShape(made, static_cast<int>(storage.size()), storage.data());
    return made;
}

inline void identity(Input& input) {
    const auto& device = Device::instance();
    const auto shape = sizes(input);
    const auto *const from = descriptor(input, shape), *const to = descriptor(input, shape);
    const auto* const source = aclCreateDataBuffer(device.tensors[0].address(), kBytesOfTensor);
    auto* const target = aclCreateDataBuffer(device.tensors[1].address(), kBytesOfTensor);
    aclopCompileAndExecute("Identity", 1, &from, &source, 1, &to, &target, nullptr, ACL_ENGINE_SYS, ACL_COMPILE_SYS,
                           nullptr, device.stream.handle);
    device.stream.wait();
    aclDestroyDataBuffer(source);
    aclDestroyDataBuffer(target);
    aclDestroyTensorDesc(from);
    aclDestroyTensorDesc(to);
}

}  // namespace fuzz
