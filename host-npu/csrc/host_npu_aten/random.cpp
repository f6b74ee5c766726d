#include "host_npu_aten/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>

#include <cstdint>

namespace host_npu {
namespace {

// NPU kernels count what they draw in steps of this many numbers.
constexpr std::uint64_t kOffsetStep = 4;

std::mutex borrowers;

// Mixes seed and offset so that neighbouring ones start unrelated sequences.
std::uint64_t mixed(std::uint64_t seed, std::uint64_t offset) {
    std::uint64_t value = seed + 0x9E3779B97F4A7C15U * (offset + 1);
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
}

std::uint64_t next_seed(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    const auto offset = generator.get_offset();
    generator.set_offset(offset + kOffsetStep);
    return mixed(generator.current_seed(), offset);
}

}  // namespace

BorrowedGenerator::BorrowedGenerator(const std::optional<at::Generator>& generator, c10::Device device)
    : turn_(borrowers) {
    // torch_npu before 2.13 does not tell PyTorch which generator that is.
    const auto seed = next_seed(generator ? *generator : at_npu::detail::getDefaultNPUGenerator(device.index()));
    auto host = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(host.mutex());
    saved_state_ = host.get_state();
    host.set_current_seed(seed);
}

BorrowedGenerator::~BorrowedGenerator() {
    auto host = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(host.mutex());
    host.set_state(saved_state_);
}

}  // namespace host_npu
