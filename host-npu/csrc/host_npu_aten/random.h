// Random numbers of NPU operators that the CPU computes.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>

namespace host_npu {

// For its lifetime the CPU's default generator continues the state of an NPU generator, so that seeds and states of
// the NPU generator do what they do on a device, and the CPU's own random numbers stay as they are.
class BorrowedGenerator {
  public:
    // `generator` is the operator's argument; the device's default generator takes its place if there is none.
    BorrowedGenerator(const std::optional<at::Generator>& generator, c10::Device device);
    ~BorrowedGenerator();
    BorrowedGenerator(const BorrowedGenerator&) = delete;
    BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

  private:
    // One operator at a time may borrow the generator.
    std::unique_lock<std::mutex> turn_;
    at::Tensor saved_state_;
};

}  // namespace host_npu
