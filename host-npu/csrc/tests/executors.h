// Access to the internals of executors, and new threads for cache tests.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <thread>

#include "tests/device.h"

namespace test {

// Runs `body` on a new thread, whose cache is empty.
inline void in_new_thread(const std::function<void()>& body) {
    std::exception_ptr error;
    std::thread([&] {
        try {
            expect_equal(aclrtSetDevice(0), 0, "aclrtSetDevice's status");
            body();
        } catch (...) {
            error = std::current_exception();
        }
    }).join();
    if (error) std::rethrow_exception(error);
}

inline std::uint64_t magic(const aclOpExecutor* executor) { return *reinterpret_cast<const std::uint64_t*>(executor); }

inline constexpr std::uint64_t kComposed = 0x1F2E3D4C5B6A;
inline constexpr std::uint64_t kCacheWrapper = 0xAFBECDDCEBFA;
inline constexpr std::uint64_t kIndividual = 0x19A312F588;

}  // namespace test
