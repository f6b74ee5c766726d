// Random numbers of NPU operators that run on the CPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace host_npu {

// Returns the seed of an operator's random numbers and advances the generator: the operator's argument, or by default
// that of the device.
std::uint64_t next_seed(const std::optional<at::Generator>& generator, c10::Device device);

// The same for an operator in a captured graph: every replay has its own seed.
class SeedOfReplay {
  public:
    SeedOfReplay(const std::optional<at::Generator>& generator, c10::Device device);
    std::uint64_t value() const;

  private:
    // In device memory, where torch_npu writes the values before a replay.
    const void* seed_;
    const void* offset_;
    std::uint64_t offset_in_graph_;
};

// Seeds the CPU's default generator and restores it on destruction, so that seeds and states of the NPU generator have
// their usual effect, and the CPU's own random numbers do not change.
class BorrowedGenerator {
  public:
    explicit BorrowedGenerator(std::uint64_t seed);
    ~BorrowedGenerator();
    BorrowedGenerator(const BorrowedGenerator&) = delete;
    BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

  private:
    // Only one operator at a time may use the generator.
    std::unique_lock<std::mutex> turn_;
    at::Tensor saved_state_;
};

}  // namespace host_npu
