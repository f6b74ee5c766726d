// Arguments in a wider dtype than their own: products of 16-bit matrices and samples of 16-bit grids are computed in
// float32 and rounded once, as on a device, and integers, which a device counts by histc and the CPU's kernel does not,
// in float64.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace host_npu {

bool has_16_bits(const at::Tensor& tensor);

// Whether the operator of this name multiplies matrices, which 16-bit arguments are widened for.
bool multiplies_matrices(std::string_view name);

// The shape of the result, if the call is one product of two matrices, or of two batches of them, that fit each other.
// Its result is contiguous and has their dtype.
std::optional<std::vector<std::int64_t>> shape_of_product(const c10::OperatorHandle& op,
                                                          c10::ArrayRef<c10::IValue*> arguments);

// The arguments of an operator in a wider dtype, if it multiplies 16-bit matrices, samples 16-bit grids or counts
// integers.
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
