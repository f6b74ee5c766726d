// Device memory and the machine's pages, whose size is not the same on all machines.
#include <unistd.h>

#include <cstdint>

#include "acl/acl.h"
#include "tests/device.h"

namespace {

using namespace test;

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

const Case whole_pages{"memory/whole_pages", [] {
                           // What one allocation makes unusable must not be a part of another one's page.
                           const Memory first(1);
                           const Memory second(1);
                           for (const auto* memory : {&first, &second}) {
                               const auto address = reinterpret_cast<std::uintptr_t>(memory->address());
                               expect_equal(address % page_bytes(), 0u, "the place in a page");
                           }
                           aclrtPtrAttributes attributes{};
                           expect_equal(aclrtPointerGetAttributes(first.address(), &attributes), 0, "the status");
                           expect_equal(attributes.pageSize, page_bytes(), "pageSize");
                       }};

const Case maps_whole_pages{"memory/maps_whole_pages", [] {
                                const auto bytes = 2 * page_bytes();
                                aclrtPhysicalMemProp properties{};
                                properties.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
                                aclrtDrvMemHandle handle = nullptr;
                                void* address = nullptr;
                                expect_equal(aclrtMallocPhysical(&handle, bytes, &properties, 0), 0, "physical memory");
                                expect_equal(aclrtReserveMemAddress(&address, bytes, 0, nullptr, 0), 0, "addresses");
                                expect(aclrtMapMem(address, page_bytes() / 2, 0, handle, 0) != 0,
                                       "half a page is mapped");
                                expect_equal(aclrtMapMem(address, page_bytes(), page_bytes(), handle, 0), 0, "a page");
                                expect_equal(aclrtUnmapMem(address), 0, "the status of unmapping");
                                expect_equal(aclrtReleaseMemAddress(address), 0, "the status of releasing");
                                expect_equal(aclrtFreePhysical(handle), 0, "the status of freeing");
                                aclGetRecentErrMsg();
                            }};

}  // namespace
