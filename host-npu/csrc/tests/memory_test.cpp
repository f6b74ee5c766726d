// Device memory, and pages, whose size depends on the machine.
#include <unistd.h>

#include <cstdint>

#include "acl/acl.h"
#include "tests/calls.h"

namespace {

using namespace test;

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

CASE("memory/whole_pages") {
    // An allocation must not protect pages that another one uses.
    const Memory first(1);
    const Memory second(1);
    for (const auto* memory : {&first, &second}) {
        const auto address = reinterpret_cast<std::uintptr_t>(memory->address());
        expect_equal(address % page_bytes(), 0u, "the place in a page");
    }
    aclrtPtrAttributes attributes{};
    expect_equal(aclrtPointerGetAttributes(first.address(), &attributes), 0, "the status");
    expect_equal(attributes.pageSize, page_bytes(), "pageSize");
}

CASE("memory/maps_whole_pages") {
    const auto bytes = 2 * page_bytes();
    aclrtPhysicalMemProp properties{};
    properties.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
    aclrtDrvMemHandle handle = nullptr;
    void* address = nullptr;
    expect_equal(aclrtMallocPhysical(&handle, bytes, &properties, 0), 0, "physical memory");
    expect_equal(aclrtReserveMemAddress(&address, bytes, 0, nullptr, 0), 0, "addresses");
    expect(aclrtMapMem(address, page_bytes() / 2, 0, handle, 0) != 0, "half a page is mapped");
    expect_equal(aclrtMapMem(address, page_bytes(), page_bytes(), handle, 0), 0, "a page");
    expect_equal(aclrtUnmapMem(address), 0, "the status of unmapping");
    expect_equal(aclrtReleaseMemAddress(address), 0, "the status of releasing");
    expect_equal(aclrtFreePhysical(handle), 0, "the status of freeing");
    aclGetRecentErrMsg();
}

// Whether the runtime accepts a copy of this size to the device.
bool fits(void* address, std::size_t bytes) {
    const std::vector<std::uint8_t> data(bytes);
    const bool fine = aclrtMemcpy(address, bytes, data.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE) == 0;
    aclGetRecentErrMsg();
    return fine;
}

bool is_strict() { return configuration() == "strict memory"; }

CASE("memory/padding", {"Ascend910B", "strict memory"}) {
    // Usable: the size rounded up to 32 bytes, plus 32.
    for (const std::size_t asked : {1, 32, 33, 64}) {
        const Memory memory(asked);
        const auto usable = is_strict() ? asked : (asked + 31) / 32 * 32 + 32;
        expect(fits(memory.address(), usable), asked, " bytes have less than ", usable);
        expect(!fits(memory.address(), usable + 1), asked, " bytes have more than ", usable);
    }
}

CASE("memory/align32_adds_nothing", {"Ascend910B", "strict memory"}) {
    void* address = nullptr;
    expect_equal(aclrtMallocAlign32(&address, 33, ACL_MEM_MALLOC_HUGE_FIRST), 0, "the status");
    const std::size_t usable = is_strict() ? 33 : 64;
    expect(fits(address, usable), "33 bytes have less than ", usable);
    expect(!fits(address, usable + 1), "33 bytes have more than ", usable);
    aclrtFree(address);
}

// The optimizer's documented example: step has shape [2, 2], but only 16 bytes of memory.
CASE("memory/kernels_use_the_padding", {"Ascend910B", "strict memory"}) {
    EmaAdam call;
    const Shape shape{2, 2};
    const Memory memory(16);
    memory.upload(encode(ACL_INT64, {10, 0}));
    auto* const step =
        aclCreateTensor(shape.data(), 2, ACL_INT64, nullptr, 0, ACL_FORMAT_ND, shape.data(), 2, memory.address());
    Phase phase;
    phase.status = aclnnApplyFusedEmaAdamGetWorkspaceSize(
        call.grad, call.var, call.m, call.v, call.s, step, call.lr, call.ema_decay, call.beta1, call.beta2, call.eps,
        call.mode, true, call.weight_decay, &phase.workspace_size, &phase.executor);
    expect_equal(phase.status, 0, "phase one's status");
    expect_equal(launch(call, phase) == 0, !is_strict(), "whether the kernel found its memory");
    recent_error();
    aclDestroyTensor(step);
}

}  // namespace
