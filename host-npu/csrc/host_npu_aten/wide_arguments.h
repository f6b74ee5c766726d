// Arguments in a wider dtype than their own: products of 16-bit matrices, samples of 16-bit grids and what the CPU has
// no 16-bit kernels of are computed in float32 and rounded once, as on a device. Where only a device takes integers,
// they are floating-point numbers here, and indices have 64 bits.
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

// Whether the operator of this name, or its variant for a given output or in place, multiplies matrices, which 16-bit
// arguments are widened for.
bool multiplies_matrices(std::string_view name);

// The shape of the result, if the call is one product of two matrices, or of two batches of them, that fit each other.
// Its result is contiguous and has their dtype.
std::optional<std::vector<std::int64_t>> shape_of_product(const c10::OperatorHandle& op,
                                                          c10::ArrayRef<c10::IValue*> arguments);

// Whether the indices that an operator returns have 32 bits on a device of this chip.
bool has_narrow_indices(const c10::OperatorHandle& op);

// The arguments of an operator in a wider dtype, if the CPU's kernels need one.
class WideArguments {
  public:
    // Puts wide tensors in the place of the arguments, unless they have several dtypes, which is the kernel's concern.
    WideArguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue*> arguments);
    bool are_wide() const { return narrow_ != wide_; }
    // Rounds the arguments that the operator has written to, and its result in place of it: to `out`, if that is
    // defined.
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
