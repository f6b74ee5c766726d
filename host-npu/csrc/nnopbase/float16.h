// Conversions of 16-bit floating point: exact to float32, rounded to nearest-even from float32.
#pragma once

#include <bit>
#include <cstdint>

namespace host_npu {

struct Float16 {
    std::uint16_t bits;
};

struct BFloat16 {
    std::uint16_t bits;
};

inline float widen(Float16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(value.bits & 0x7FFFu) << 13;
    // The exponent biases differ by 112; multiplying by 2^112 adjusts the bias, and normalizes subnormals.
    const float moved = std::bit_cast<float>(rest) * 0x1p112f;
    const std::uint32_t special = (value.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(moved) | special | sign);
}

inline float widen(BFloat16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

inline Float16 round_to_float16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const auto magnitude = bits & 0x7FFFFFFFu;
    const bool is_nan = magnitude > 0x7F800000u;
    // Values from 65520 round to infinity.
    const bool overflows = magnitude >= 0x477FF000u;
    // Subnormals are multiples of 2^-24, the spacing of float32 at 0.5: adding 0.5 rounds to it.
    const float spaced = std::bit_cast<float>(magnitude) + 0.5f;
    const auto subnormal = std::bit_cast<std::uint32_t>(spaced) - 0x3F000000u;
    const auto odd = (magnitude >> 13) & 1u;
    const auto normal = (magnitude - 0x38000000u + 0xFFFu + odd) >> 13;
    const auto finite = magnitude < 0x38800000u ? subnormal : normal;
    const auto rounded = is_nan ? 0x7E00u : overflows ? 0x7C00u : finite;
    return {static_cast<std::uint16_t>(rounded | sign)};
}

inline BFloat16 round_to_bfloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const auto rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

}  // namespace host_npu
