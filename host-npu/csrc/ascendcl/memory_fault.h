// Says why the process ends when something touches device memory that may not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace host_npu {

// Explains faults in the `size` device addresses from `device` and in their aliases from `alias` on stderr, before the
// faults take their course.
void explain_memory_faults(std::uintptr_t device, std::uintptr_t alias, std::size_t size);

}  // namespace host_npu
