// op::fp16_t, 16-bit floating point for programs on the host, implemented in libnnopbase.
#pragma once

#include <cstdint>
#include <type_traits>

#include "aclnn/acl_meta.h"

namespace op {

struct ACLNN_API tagFp16 {
    std::uint16_t val = 0;

    tagFp16() = default;
    // User-provided, because the ABI passes such a type by address.
    tagFp16(const tagFp16& other) : val(other.val) {}
    // Takes the bits; other numbers are converted.
    tagFp16(const std::uint16_t& bits) : val(bits) {}
    template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
    tagFp16(const Number& value) {
        *this = value;
    }

    tagFp16& operator=(const tagFp16& other);
    tagFp16& operator=(const float& value);
    tagFp16& operator=(const double& value);
    tagFp16& operator=(const std::int8_t& value);
    tagFp16& operator=(const std::uint8_t& value);
    tagFp16& operator=(const std::int16_t& value);
    tagFp16& operator=(const std::uint16_t& value);
    tagFp16& operator=(const std::int32_t& value);
    tagFp16& operator=(const std::uint32_t& value);
    tagFp16& operator=(const std::int64_t& value);
    tagFp16& operator=(const std::uint64_t& value);

    tagFp16 operator+(const tagFp16 other);
    tagFp16 operator-(const tagFp16 other);
    tagFp16 operator*(const tagFp16 other);
    tagFp16 operator/(const tagFp16 other);
    tagFp16 operator+=(const tagFp16 other);
    tagFp16 operator-=(const tagFp16 other);
    tagFp16 operator*=(const tagFp16 other);
    tagFp16 operator/=(const tagFp16 other);

    bool operator==(const tagFp16& other) const;
    bool operator!=(const tagFp16& other) const;
    bool operator>(const tagFp16& other) const;
    bool operator>=(const tagFp16& other) const;
    bool operator<(const tagFp16& other) const;
    bool operator<=(const tagFp16& other) const;

    operator float() const;
    operator double() const;
    operator std::int8_t() const;
    operator std::uint8_t() const;
    operator std::int16_t() const;
    operator std::uint16_t() const;
    operator std::int32_t() const;
    operator std::uint32_t() const;
    operator std::int64_t() const;
    operator std::uint64_t() const;
    operator bool() const;

    // Returns 1 or -1 for an infinity, else 0.
    int IsInf();
    float toFloat();
    double toDouble();
    std::int8_t toInt8();
    std::uint8_t toUInt8();
    std::int16_t toInt16();
    std::uint16_t toUInt16();
    std::int32_t toInt32();
    std::uint32_t toUInt32();
};

using fp16_t = tagFp16;

}  // namespace op
