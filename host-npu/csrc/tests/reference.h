// What the operators should calculate, in double precision.
#pragma once

#include <random>

#include "tests/device.h"

namespace test {

// Reproducible values between two bounds, as a type can hold them.
inline std::vector<double> random_values(aclDataType dtype, std::int64_t count, double low, double high,
                                         unsigned seed) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<double> distribution(low, high);
    std::vector<double> values;
    for (std::int64_t index = 0; index < count; ++index) values.push_back(rounded(dtype, distribution(generator)));
    return values;
}

// The element of a contiguous tensor of shape `from` that is broadcast to element `flat` of shape `to`.
inline std::size_t broadcast_index(const Shape& from, const Shape& to, std::int64_t flat) {
    std::int64_t index = 0;
    std::int64_t stride = 1;
    for (std::size_t place = 0; place < to.size(); ++place) {
        const auto size = to[to.size() - 1 - place];
        const auto at = flat % size;
        flat /= size;
        if (place >= from.size()) continue;
        const auto own = from[from.size() - 1 - place];
        if (own != 1) index += at * stride;
        stride *= own;
    }
    return static_cast<std::size_t>(index);
}

// One rounding of a type, relative.
inline double epsilon(aclDataType dtype) {
    return dtype == ACL_FLOAT ? 1e-6 : dtype == ACL_FLOAT16 ? 0x1p-11 * 1.01 : 0x1p-8 * 1.01;
}

}  // namespace test
