// Differences between the chips.
#pragma once

#include <cstdint>

#include "ascendcl/device.h"
#include "nnopbase/dtype.h"

namespace host_npu {

template <class... Socs>
bool is_one_of(Soc chip, Socs... socs) {
    return ((chip == socs) || ...);
}

// A2 and A3 share an architecture; they and the Ascend950 have bfloat16 arithmetic.
inline bool is_a2_or_a3() { return is_one_of(soc(), Soc::Ascend910B, Soc::Ascend910_93); }
inline bool has_bfloat16() { return is_a2_or_a3() || soc() == Soc::Ascend950; }

// The floating types that the losses and the embedding support.
inline DtypeSet float_dtypes() {
    constexpr DtypeSet everywhere{ACL_FLOAT, ACL_FLOAT16};
    return has_bfloat16() ? everywhere | DtypeSet{ACL_BF16} : everywhere;
}

// The number of AI cores with a matrix unit.
inline std::int64_t cube_cores() {
    switch (soc()) {
        case Soc::Ascend910:
        case Soc::Ascend950:
            return 32;
        case Soc::Ascend310P:
            return 8;
        default:
            return 24;
    }
}

// The size of a vector core's unified buffer on A2 and A3, in bytes.
inline constexpr std::int64_t kUnifiedBuffer = 192 * 1024;

}  // namespace host_npu
