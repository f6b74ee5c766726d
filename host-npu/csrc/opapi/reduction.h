// The reductions of the losses.
#pragma once

#include <cstdint>
#include <limits>

namespace host_npu {

inline constexpr std::int64_t kNone = 0;
inline constexpr std::int64_t kMean = 1;

// The loss of an empty tensor.
inline float loss_of_empty(std::int64_t reduction) {
    return reduction == kMean ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
}

}  // namespace host_npu
