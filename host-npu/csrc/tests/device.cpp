#include "tests/device.h"

#include <algorithm>
#include <bit>
#include <complex>
#include <cstring>
#include <numeric>

namespace test {
namespace {

// Rounds to `digits` binary digits, at least multiples of 2^lowest; infinite from `limit`.
double round_binary(double value, int digits, int lowest, double limit) {
    if (!std::isfinite(value) || value == 0) return value;
    int exponent = 0;
    std::frexp(value, &exponent);
    const int unit = std::max(exponent - digits, lowest);
    const double result = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
    return std::fabs(result) >= limit ? std::copysign(INFINITY, value) : result;
}

std::uint16_t float16_bits(double value) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const double magnitude = std::fabs(rounded(ACL_FLOAT16, value));
    if (std::isnan(value)) return 0x7E00;
    if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | 0x7C00);
    if (magnitude < 0x1p-14) return static_cast<std::uint16_t>(sign | static_cast<int>(std::ldexp(magnitude, 24)));
    int exponent = 0;
    const double fraction = std::frexp(magnitude, &exponent);
    const int mantissa = static_cast<int>(std::ldexp(fraction, 11)) - 1024;
    return static_cast<std::uint16_t>(sign | (exponent + 14) << 10 | mantissa);
}

double float16_value(std::uint16_t bits) {
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    const int exponent = bits >> 10 & 31;
    const int mantissa = bits & 1023;
    if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
    return exponent == 0 ? sign * std::ldexp(mantissa, -24) : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// Calls `body` with a number of the type; 16-bit types are passed as their bits.
template <class Body>
auto with_number(aclDataType dtype, const Body& body) {
    switch (dtype) {
        case ACL_FLOAT:
            return body(0.0f);
        case ACL_DOUBLE:
            return body(0.0);
        case ACL_FLOAT16:
        case ACL_BF16:
            return body(std::uint16_t{});
        case ACL_INT64:
            return body(std::int64_t{});
        case ACL_INT32:
            return body(std::int32_t{});
        case ACL_INT16:
            return body(std::int16_t{});
        case ACL_INT8:
            return body(std::int8_t{});
        case ACL_COMPLEX64:
            return body(std::complex<float>{});
        case ACL_COMPLEX128:
            return body(std::complex<double>{});
        default:
            return body(std::uint8_t{});
    }
}

double bfloat16_bits(double value) {
    return std::bit_cast<std::uint32_t>(static_cast<float>(rounded(ACL_BF16, value))) >> 16;
}

void append(std::vector<std::uint8_t>& bytes, aclDataType dtype, double value) {
    const double stored = dtype == ACL_FLOAT16 ? float16_bits(value) : dtype == ACL_BF16 ? bfloat16_bits(value) : value;
    with_number(dtype, [&]<class Number>(Number number) {
        number = static_cast<Number>(stored);
        const auto* const begin = reinterpret_cast<const std::uint8_t*>(&number);
        bytes.insert(bytes.end(), begin, begin + sizeof number);
    });
}

double value_at(aclDataType dtype, const std::uint8_t* from) {
    return with_number(dtype, [&](auto number) {
        std::memcpy(&number, from, sizeof number);
        const auto value = static_cast<double>(std::real(number));
        if (dtype == ACL_FLOAT16) return float16_value(static_cast<std::uint16_t>(value));
        if (dtype == ACL_BF16) return double{std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16)};
        return value;
    });
}

}  // namespace

std::int64_t numel(const Shape& shape) {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::size_t item_size(aclDataType dtype) {
    return with_number(dtype, [](auto number) { return sizeof number; });
}

double rounded(aclDataType dtype, double value) {
    if (dtype == ACL_FLOAT) return static_cast<float>(value);
    if (dtype == ACL_FLOAT16) return round_binary(value, 11, -24, 65520);
    if (dtype == ACL_BF16) return round_binary(value, 8, -133, 0x1p128);
    return value;
}

std::vector<std::uint8_t> encode(aclDataType dtype, const std::vector<double>& values) {
    std::vector<std::uint8_t> bytes;
    for (const auto value : values) append(bytes, dtype, value);
    return bytes;
}

std::vector<double> decode(aclDataType dtype, const std::vector<std::uint8_t>& bytes) {
    std::vector<double> values;
    for (std::size_t at = 0; at < bytes.size(); at += item_size(dtype)) values.push_back(value_at(dtype, &bytes[at]));
    return values;
}

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    expect_equal(aclrtMalloc(&address_, bytes, ACL_MEM_MALLOC_HUGE_FIRST), 0, "aclrtMalloc's status");
}

Memory::~Memory() {
    if (address_ != nullptr) aclrtFree(address_);
}

void Memory::upload(const std::vector<std::uint8_t>& from) const {
    if (from.empty()) return;
    expect_equal(aclrtMemcpy(address_, bytes_, from.data(), from.size(), ACL_MEMCPY_HOST_TO_DEVICE), 0,
                 "aclrtMemcpy's status");
}

std::vector<std::uint8_t> Memory::download() const {
    std::vector<std::uint8_t> bytes(bytes_);
    if (bytes_ > 0) {
        expect_equal(aclrtMemcpy(bytes.data(), bytes_, address_, bytes_, ACL_MEMCPY_DEVICE_TO_HOST), 0,
                     "aclrtMemcpy's status");
    }
    return bytes;
}

Tensor::Tensor(aclDataType dtype, Shape shape, std::vector<double> values, View view)
    : dtype_(dtype), shape_(std::move(shape)) {
    const auto storage = view.storage.value_or(shape_);
    const auto count = static_cast<std::size_t>(numel(storage));
    if (values.size() == 1) values.assign(count, values[0]);
    memory_.emplace(count * item_size(dtype));
    set(values);
    tensor_ = aclCreateTensor(shape_.data(), shape_.size(), dtype, view.strides ? view.strides->data() : nullptr,
                              view.offset, view.format, storage.data(), storage.size(), memory_->address());
    expect(tensor_ != nullptr, "aclCreateTensor returned null");
}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    std::swap(dtype_, other.dtype_);
    std::swap(shape_, other.shape_);
    std::swap(memory_, other.memory_);
    return *this;
}

std::vector<double> Tensor::values() const { return decode(dtype_, memory_->download()); }

void Tensor::set(const std::vector<double>& values) const { memory_->upload(encode(dtype_, values)); }

void Tensor::destroy_handle() { aclDestroyTensor(std::exchange(tensor_, nullptr)); }

Tensor floats(Shape shape, std::vector<double> values) { return {ACL_FLOAT, std::move(shape), std::move(values)}; }

Stream::Stream() { expect_equal(aclrtCreateStream(&handle), 0, "aclrtCreateStream's status"); }
Stream::~Stream() { aclrtDestroyStream(handle); }
aclError Stream::wait() const { return aclrtSynchronizeStream(handle); }

std::optional<std::string> recent_error() {
    const char* const message = aclGetRecentErrMsg();
    return message == nullptr ? std::nullopt : std::optional<std::string>(message);
}

}  // namespace test
