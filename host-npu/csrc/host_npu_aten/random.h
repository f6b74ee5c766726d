// Random numbers of NPU operators that the CPU computes.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace host_npu {

// The seed of an operator's random numbers, which moves the generator on. `generator` is the operator's argument; the
// device's default generator takes its place if there is none.
std::uint64_t next_seed(const std::optional<at::Generator>& generator, c10::Device device);

// The same for an operator in a captured graph: every replay has a seed of its own.
class SeedOfReplay {
  public:
    SeedOfReplay(const std::optional<at::Generator>& generator, c10::Device device);
    std::uint64_t value() const;

  private:
    // In device memory, where torch_npu writes them before a replay.
    const void* seed_;
    const void* offset_;
    std::uint64_t offset_in_graph_;
};

// For its lifetime the CPU's default generator starts at a seed, so that seeds and states of the NPU generator do what
// they do on a device, and the CPU's own random numbers stay as they are.
class BorrowedGenerator {
  public:
    explicit BorrowedGenerator(std::uint64_t seed);
    ~BorrowedGenerator();
    BorrowedGenerator(const BorrowedGenerator&) = delete;
    BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

  private:
    // One operator at a time may borrow the generator.
    std::unique_lock<std::mutex> turn_;
    at::Tensor saved_state_;
};

}  // namespace host_npu
