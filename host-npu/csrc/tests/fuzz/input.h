// The decoding of a fuzzer's bytes. Missing bytes are zeros, so that every input is valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

namespace fuzz {

class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    bool at_end() const { return at_ >= size_; }
    std::size_t position() const { return at_; }
    void go_back_to(std::size_t position) { at_ = position; }

    std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }

    // -8 to 231, or a number that provokes overflow.
    std::int64_t integer() {
        constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
        constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
        constexpr std::int64_t kExtremes[] = {
            kLeast,    kLeast + 1, -(std::int64_t{1} << 32),
            -65536,    4096,       65535,
            1 << 24,   kMost / 8,  kMost,
            kMost - 1, kMost / 2,  (1LL << 31) - 1,
            1LL << 31, 1LL << 32,  3'037'000'500LL,
            kMost / 3,
        };
        constexpr int kSmall = 256 - static_cast<int>(std::size(kExtremes));
        const int code = byte();
        return code < kSmall ? code - 8 : kExtremes[code - kSmall];
    }

    template <class Float>
    Float floating() {
        using Limits = std::numeric_limits<Float>;
        constexpr Float kValues[] = {Float(0),      Float(1),         Float(0.5),          Float(0.999),
                                     Float(1e-8),   Float(-1),        Limits::infinity(),  -Limits::infinity(),
                                     Limits::max(), Limits::lowest(), Limits::quiet_NaN(), Limits::denorm_min()};
        return kValues[byte() % std::size(kValues)];
    }

    // Any value that a C program may assign to an enumeration of CANN.
    template <class Enumeration>
    Enumeration enumeration() {
        return static_cast<Enumeration>(byte() % 64 - 1);
    }

  private:
    const std::uint8_t* data_;
    std::size_t size_;
    std::size_t at_ = 0;
};

}  // namespace fuzz
