// Widening of arguments: products of 16-bit matrices, samples of 16-bit grids, accumulations of 16-bit numbers, and
// operators without 16-bit CPU kernels are computed in float32 and rounded once, as on a device. Integers that only a
// device supports become floating-point numbers, and indices are widened to 64 bits.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace host_npu {

bool has_16_bits(const at::Tensor& tensor);

// Whether the operator, or its out or in-place variant, multiplies matrices, whose 16-bit arguments are widened.
bool multiplies_matrices(std::string_view name);

// Returns the shape of the result if the call is one product of two matching matrices, or of two batches of them. The
// result is contiguous and has their dtype.
std::optional<std::vector<std::int64_t>> shape_of_product(const c10::OperatorHandle& op,
                                                          c10::ArrayRef<c10::IValue*> arguments);

// Whether the operator returns 32-bit indices on this chip.
bool has_narrow_indices(const c10::OperatorHandle& op);

// Widens the arguments of an operator where the CPU kernel needs it.
class WideArguments {
  public:
    // Replaces the arguments by wide tensors. Arguments of different dtypes are left to the kernel.
    WideArguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue*> arguments);
    bool are_wide() const { return narrow_ != wide_; }
    // Round the arguments that the operator has written to, and its result, to `out` if defined.
    void round_written() const;
    void round_result(c10::IValue& result, const at::Tensor& out) const;

  private:
    struct Written {
        at::Tensor narrow;
        at::Tensor wide;
    };

    at::ScalarType narrow_ = at::kFloat, wide_ = at::kFloat;
    std::vector<Written> written_;
};

}  // namespace host_npu
