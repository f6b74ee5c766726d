// Conversions of elements between the data types and the types in which kernels compute.
#pragma once

#include <complex>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "nnopbase/dtype.h"
#include "nnopbase/float16.h"

namespace host_npu {

template <class Value>
inline constexpr bool kIsComplex = false;
template <class Part>
inline constexpr bool kIsComplex<std::complex<Part>> = true;

template <class Value>
inline constexpr bool kIs16Bit = std::is_same_v<Value, Float16> || std::is_same_v<Value, BFloat16>;

// Rounds toward zero; NaN becomes 0. 64-bit and signed 32-bit integers saturate, as on the device. For other types, the
// low bits of the 64-bit integer remain, as in PyTorch.
template <class To, class Float>
To to_integer(Float value) {
    using Wide = std::conditional_t<std::is_same_v<To, std::int32_t>, std::int32_t, std::int64_t>;
    using Limits = std::numeric_limits<Wide>;
    constexpr auto end = -static_cast<Float>(Limits::min());
    if (!(value == value)) return 0;
    if constexpr (std::is_same_v<To, std::uint64_t>) {
        if (value >= end) return value < 2 * end ? static_cast<To>(value) : std::numeric_limits<To>::max();
    }
    if (value >= end) return static_cast<To>(Limits::max());
    if (value < -end) return static_cast<To>(Limits::min());
    return static_cast<To>(static_cast<Wide>(value));
}

template <class To, class From>
To convert(From value) {
    if constexpr (std::is_same_v<To, From>) {
        return value;
    } else if constexpr (kIs16Bit<From>) {
        return convert<To>(widen(value));
    } else if constexpr (kIsComplex<From> && !kIsComplex<To>) {
        if constexpr (std::is_same_v<To, bool>) return value != From{};
        return convert<To>(value.real());
    } else if constexpr (kIsComplex<From>) {
        using Part = typename To::value_type;
        return To(static_cast<Part>(value.real()), static_cast<Part>(value.imag()));
    } else if constexpr (kIsComplex<To>) {
        return To(convert<typename To::value_type>(value));
    } else if constexpr (std::is_same_v<To, Float16>) {
        return round_to_float16(static_cast<float>(value));
    } else if constexpr (std::is_same_v<To, BFloat16>) {
        return round_to_bfloat16(static_cast<float>(value));
    } else if constexpr (std::is_same_v<To, bool>) {
        return value != From{};
    } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
        return to_integer<To>(value);
    } else {
        return static_cast<To>(value);
    }
}

// Calls `visitor` with a value of the C++ type of `dtype`.
template <class Visitor>
decltype(auto) visit(aclDataType dtype, Visitor&& visitor) {
    switch (dtype) {
        case ACL_FLOAT:
            return visitor(float{});
        case ACL_FLOAT16:
            return visitor(Float16{});
        case ACL_BF16:
            return visitor(BFloat16{});
        case ACL_DOUBLE:
            return visitor(double{});
        case ACL_INT8:
            return visitor(std::int8_t{});
        case ACL_INT16:
            return visitor(std::int16_t{});
        case ACL_INT32:
            return visitor(std::int32_t{});
        case ACL_INT64:
            return visitor(std::int64_t{});
        case ACL_UINT8:
            return visitor(std::uint8_t{});
        case ACL_UINT16:
            return visitor(std::uint16_t{});
        case ACL_UINT32:
            return visitor(std::uint32_t{});
        case ACL_UINT64:
            return visitor(std::uint64_t{});
        case ACL_BOOL:
            return visitor(bool{});
        case ACL_COMPLEX64:
            return visitor(std::complex<float>{});
        case ACL_COMPLEX128:
            return visitor(std::complex<double>{});
        default:
            throw std::invalid_argument("no kernel has elements of this type");
    }
}

}  // namespace host_npu
