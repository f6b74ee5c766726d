// The workspace sizes that CANN returns.
#pragma once

#include <cstdint>

#include "nnopbase/dtype.h"
#include "nnopbase/tensor.h"
#include "opapi/checks.h"

namespace host_npu {

// AscendC kernels reserve this for the system.
inline constexpr std::uint64_t kLibraryWorkspace = 16 * 1024 * 1024;

inline std::int64_t divide_up(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }

// The workspace of a composed operator: the tensors between its kernels, and the kernels' own workspaces.
class Intermediates {
  public:
    // The workspace of an AscendC kernel; `own` is added to the reserve.
    Intermediates& kernel(std::uint64_t own = 0) { return bytes(static_cast<std::int64_t>(kLibraryWorkspace + own)); }

    Intermediates& bytes(std::int64_t count) {
        // The graph's allocator pads and aligns each tensor.
        total_ += (static_cast<std::uint64_t>(count) + 32 + 511) / 512 * 512;
        return *this;
    }

    Intermediates& tensor(const Dims& shape, aclDataType dtype) {
        return bytes(shape.numel() * static_cast<std::int64_t>(item_size(dtype)));
    }

    // The tensors between an argument and its kernel: a contiguous copy, a cast, both or neither.
    Intermediates& argument(const Layout& layout, aclDataType kernel_dtype) {
        if (is_copied(layout)) tensor(layout.shape, layout.dtype);
        if (layout.dtype != kernel_dtype) tensor(layout.shape, kernel_dtype);
        return *this;
    }

    std::uint64_t total() const { return total_; }

  private:
    std::uint64_t total_ = 0;
};

}  // namespace host_npu
