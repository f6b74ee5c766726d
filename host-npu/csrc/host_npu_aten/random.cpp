#include "host_npu_aten/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>

#include <cstdint>
#include <cstring>

#include "ascendcl/device.h"

namespace host_npu {
namespace {

// The granularity in which NPU kernels advance the offset of the generator.
constexpr std::uint64_t kOffsetStep = 4;

std::mutex borrowers;

// Mixes seed and offset, so that adjacent values start unrelated sequences.
std::uint64_t mixed(std::uint64_t seed, std::uint64_t offset) {
    std::uint64_t value = seed + 0x9E3779B97F4A7C15U * (offset + 1);
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
}

// torch_npu before 2.13 does not register its default generator with PyTorch.
const at::Generator& or_default(const std::optional<at::Generator>& generator, c10::Device device) {
    return generator ? *generator : at_npu::detail::getDefaultNPUGenerator(device.index());
}

std::uint64_t read(const void* in_device_memory) {
    std::uint64_t value = 0;
    std::memcpy(&value, host_alias(in_device_memory, sizeof value), sizeof value);
    return value;
}

}  // namespace

std::uint64_t next_seed(const std::optional<at::Generator>& argument, c10::Device device) {
    auto generator = or_default(argument, device);
    const std::lock_guard lock(generator.mutex());
    const auto offset = generator.get_offset();
    generator.set_offset(offset + kOffsetStep);
    return mixed(generator.current_seed(), offset);
}

SeedOfReplay::SeedOfReplay(const std::optional<at::Generator>& argument, c10::Device device) {
    auto generator = or_default(argument, device);
    auto* const npu_generator = at::check_generator<at_npu::NPUGeneratorImpl>(generator);
    const std::lock_guard lock(generator.mutex());
    const auto state = npu_generator->philox_npu_state(kOffsetStep);
    TORCH_CHECK(state.captured_, "the generator of the NPU does not take part in the capture");
    seed_ = state.seed_.ptr->const_data_ptr();
    offset_ = state.offset_.ptr->const_data_ptr();
    offset_in_graph_ = state.offset_intragraph_;
}

std::uint64_t SeedOfReplay::value() const { return mixed(read(seed_), read(offset_) + offset_in_graph_); }

BorrowedGenerator::BorrowedGenerator(std::uint64_t seed) : turn_(borrowers) {
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
