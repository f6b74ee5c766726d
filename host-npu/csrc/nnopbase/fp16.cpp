// op::fp16_t: conversions and float32 arithmetic, each rounded once to nearest-even.
#include <bit>
#include <cmath>
#include <limits>

#include "aclnn/opdev/fp16_t.h"
#include "nnopbase/float16.h"

namespace op {
namespace {

constexpr std::uint16_t kSign = 0x8000;
constexpr std::uint16_t kInfinity = 0x7C00;

float to_float(std::uint16_t bits) { return host_npu::widen(host_npu::Float16{bits}); }

std::uint16_t round_float(float value) { return host_npu::round_to_float16(value).bits; }

std::uint16_t round_double(double value) {
    const auto nearest = static_cast<float>(value);
    if (std::isnan(value) || nearest == value) return round_float(nearest);
    // Round to odd first, so that rounding twice is exact.
    auto bits = std::bit_cast<std::uint32_t>(nearest);
    if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
    return round_float(std::bit_cast<float>(bits | 1u));
}

// Rounds to nearest-even and saturates. NaN converts like infinity.
template <class Integer>
Integer to_integer(std::uint16_t bits) {
    constexpr auto lowest = std::numeric_limits<Integer>::lowest();
    constexpr auto highest = std::numeric_limits<Integer>::max();
    const bool negative = (bits & kSign) != 0;
    if ((bits & kInfinity) == kInfinity) return negative ? lowest : highest;
    const double value = std::nearbyint(to_float(bits));
    if (value <= static_cast<double>(lowest)) return lowest;
    return value >= static_cast<double>(highest) ? highest : static_cast<Integer>(value);
}

}  // namespace

tagFp16& tagFp16::operator=(const tagFp16& other) {
    val = other.val;
    return *this;
}
tagFp16& tagFp16::operator=(const float& value) {
    val = round_float(value);
    return *this;
}
tagFp16& tagFp16::operator=(const double& value) {
    val = round_double(value);
    return *this;
}
tagFp16& tagFp16::operator=(const std::int8_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::uint8_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::int16_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::uint16_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::int32_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::uint32_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::int64_t& value) { return *this = static_cast<double>(value); }
tagFp16& tagFp16::operator=(const std::uint64_t& value) { return *this = static_cast<double>(value); }

tagFp16 tagFp16::operator+(const tagFp16 other) { return round_float(to_float(val) + to_float(other.val)); }
tagFp16 tagFp16::operator-(const tagFp16 other) { return round_float(to_float(val) - to_float(other.val)); }
tagFp16 tagFp16::operator*(const tagFp16 other) { return round_float(to_float(val) * to_float(other.val)); }
tagFp16 tagFp16::operator/(const tagFp16 other) { return round_float(to_float(val) / to_float(other.val)); }
tagFp16 tagFp16::operator+=(const tagFp16 other) { return *this = *this + other; }
tagFp16 tagFp16::operator-=(const tagFp16 other) { return *this = *this - other; }
tagFp16 tagFp16::operator*=(const tagFp16 other) { return *this = *this * other; }
tagFp16 tagFp16::operator/=(const tagFp16 other) { return *this = *this / other; }

// Compares bits, except that the two zeros are equal.
bool tagFp16::operator==(const tagFp16& other) const {
    return val == other.val || ((val | other.val) & ~kSign & 0xFFFF) == 0;
}
bool tagFp16::operator!=(const tagFp16& other) const { return !(*this == other); }
bool tagFp16::operator>(const tagFp16& other) const { return to_float(val) > to_float(other.val); }
bool tagFp16::operator>=(const tagFp16& other) const { return *this > other || *this == other; }
bool tagFp16::operator<(const tagFp16& other) const { return !(*this >= other); }
bool tagFp16::operator<=(const tagFp16& other) const { return !(*this > other); }

tagFp16::operator float() const { return to_float(val); }
tagFp16::operator double() const { return to_float(val); }
tagFp16::operator std::int8_t() const { return to_integer<std::int8_t>(val); }
tagFp16::operator std::uint8_t() const { return to_integer<std::uint8_t>(val); }
tagFp16::operator std::int16_t() const { return to_integer<std::int16_t>(val); }
tagFp16::operator std::uint16_t() const { return to_integer<std::uint16_t>(val); }
tagFp16::operator std::int32_t() const { return to_integer<std::int32_t>(val); }
tagFp16::operator std::uint32_t() const { return to_integer<std::uint32_t>(val); }
tagFp16::operator std::int64_t() const { return to_integer<std::int32_t>(val); }
tagFp16::operator std::uint64_t() const { return to_integer<std::uint32_t>(val); }
tagFp16::operator bool() const { return val != 0; }

int tagFp16::IsInf() {
    if ((val & ~kSign & 0xFFFF) != kInfinity) return 0;
    return (val & kSign) != 0 ? -1 : 1;
}
float tagFp16::toFloat() { return to_float(val); }
double tagFp16::toDouble() { return to_float(val); }
std::int8_t tagFp16::toInt8() { return to_integer<std::int8_t>(val); }
std::uint8_t tagFp16::toUInt8() { return to_integer<std::uint8_t>(val); }
std::int16_t tagFp16::toInt16() { return to_integer<std::int16_t>(val); }
std::uint16_t tagFp16::toUInt16() { return to_integer<std::uint16_t>(val); }
std::int32_t tagFp16::toInt32() { return to_integer<std::int32_t>(val); }
std::uint32_t tagFp16::toUInt32() { return to_integer<std::uint32_t>(val); }

}  // namespace op
