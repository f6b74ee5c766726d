// The device that all inputs use.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "acl/acl.h"
#include "tests/device.h"

namespace fuzz {

inline constexpr std::size_t kMostTensors = 16;
inline constexpr std::size_t kBytesOfTensor = 16 * 1024;
// What a launch may take, so that thousands of them a second are possible.
inline constexpr std::uint64_t kMostWorkspace = std::uint64_t{32} << 20;

inline void require(bool fine, const char* what) {
    if (fine) return;
    std::cerr << "fuzz: " << what << std::endl;
    std::abort();
}

// Memory and a stream that all inputs use.
struct Device {
    Device() : workspace(kMostWorkspace) {
        for (std::size_t index = 0; index < kMostTensors; ++index) tensors.emplace_back(kBytesOfTensor);
    }
    static Device& instance() {
        static auto& device = *new Device;
        return device;
    }
    void fill(std::uint8_t byte) const {
        for (const auto& memory : tensors) aclrtMemset(memory.address(), kBytesOfTensor, byte, kBytesOfTensor);
    }

    std::vector<test::Memory> tensors;
    test::Memory workspace;
    test::Stream stream;
};

}  // namespace fuzz
