// Fused row kernels: statistics, softmax and gradient of a row of logits.
//
// A row of logits fits in the L2 cache. torch's operators read all rows from main memory once for each of: maximum,
// exponentials, their sum, its reciprocal, the gradient and its rounding. Here everything is computed for a row before
// the next one is read.
//
// The loops are plain C++, which the compiler vectorizes for each instruction set. They only call each other: functions
// that the linker shares with the rest of the library could use instructions that the CPU does not have.

#include "linear_cross_entropy_rows.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace torch_aclnn_ops {
namespace {

// std::bit_cast, which GCC 10 has not.
template <class To, class From>
[[gnu::always_inline]] inline To bit_cast(const From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// e^x for x <= 0. It is 2^n e^r with n the integer nearest to x / ln 2, so that |r| <= ln 2 / 2, where eight terms of
// the series are exact to r^8 / 8! < 6e-9. ln 2 is split in two, of which the first has so few digits that its product
// with n is exact.
[[gnu::always_inline]] inline float exponential(const float x) {
    const float bounded = x < -104 ? -104 : x;  // becomes 0, as less does; nan stays
    // Numbers of this size are integers: the sum is rounded to one, and its last bits are n.
    constexpr float kRound = 12582912;
    const float rounded = bounded * 1.44269504F + kRound;
    const float n = rounded - kRound;
    const float r = (bounded - n * 0.693359375F) - n * -2.12194440e-4F;
    float sum = 1.F / 5040;
    sum = sum * r + 1.F / 720;
    sum = sum * r + 1.F / 120;
    sum = sum * r + 1.F / 24;
    sum = sum * r + 1.F / 6;
    sum = sum * r + 1.F / 2;
    sum = sum * r + 1;
    sum = sum * r + 1;
    // 2^n is made of its bits, in two factors, because it may be less than the smallest normal number.
    constexpr uint32_t kBias = 127, kFractionBits = 23;
    const int32_t power = static_cast<int32_t>(bit_cast<uint32_t>(rounded) - bit_cast<uint32_t>(kRound));
    const auto half = static_cast<uint32_t>(power >> 1);
    const auto other_half = static_cast<uint32_t>(power) - half;
    sum *= bit_cast<float>((half + kBias) << kFractionBits);
    return sum * bit_cast<float>((other_half + kBias) << kFractionBits);
}

// Returns the largest logit, or nan if one is nan.
[[gnu::always_inline]] inline float maximum_of(const float* const row, const int64_t classes) {
    float largest = -std::numeric_limits<float>::infinity();
    int32_t has_nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
    for (int64_t place = 0; place < classes; ++place) {
        largest = row[place] > largest ? row[place] : largest;
        has_nan |= static_cast<int32_t>(row[place] != row[place]);
    }
    return has_nan != 0 ? std::numeric_limits<float>::quiet_NaN() : largest;
}

// Returns the sum of exp(z - maximum), and overwrites the logits z with these terms unless they are constant.
template <class Row>
[[gnu::always_inline]] inline float exponentiate(Row* const row, const int64_t classes, const float maximum) {
    constexpr int64_t kShortSum = 512;  // sums of so many numbers lose few digits
    double total = 0;
    for (int64_t begin = 0; begin < classes; begin += kShortSum) {
        const int64_t end = classes - begin < kShortSum ? classes : begin + kShortSum;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t place = begin; place < end; ++place) {
            const float power = exponential(row[place] - maximum);
            if constexpr (!std::is_const_v<Row>) {
                row[place] = power;
            }
            sum += power;
        }
        total += sum;
    }
    return static_cast<float>(total);
}

[[gnu::always_inline]] inline void write(const float value, float& out) { out = value; }

// Rounds to the nearest number, and to the even one of two.
[[gnu::always_inline]] inline void write(const float value, BFloat16& out) {
    constexpr uint32_t kNan = 0x7fc0, kDropped = 16;
    const auto bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> kDropped) & 1U)) >> kDropped;
    out.bits = static_cast<uint16_t>(value != value ? kNan : rounded);
}

template <class Number>
[[gnu::always_inline]] inline void scale(const float* const row, const int64_t classes, const float factor,
                                         Number* const out) {
#pragma omp simd
    for (int64_t place = 0; place < classes; ++place) {
        write(row[place] * factor, out[place]);
    }
}

struct Reduced {
    Statistics statistics;
    float sum;  // of exp(z - maximum)
};

// Returns the statistics of logits z, and overwrites them with exp(z - maximum) unless they are constant.
template <class Row>
[[gnu::always_inline]] inline Reduced reduce(Row* const row, const int64_t classes, const int64_t target) {
    const float maximum = maximum_of(row, classes);
    const float predicted = target >= 0 && target < classes ? row[target] - maximum : 0;
    const float sum = exponentiate(row, classes, maximum);
    return {{maximum, std::log(sum), predicted}, sum};
}

[[gnu::always_inline]] inline float softmax(float* const row, const int64_t classes, const float logits_max) {
    const float sum = exponentiate(row, classes, logits_max);
    scale(row, classes, 1 / sum, row);
    return std::log(sum);
}

template <class Number>
[[gnu::always_inline]] inline Statistics differentiate(float* const row, const int64_t classes, const int64_t target,
                                                       const Factors& factors, Number* const out) {
    const bool has_target = target >= 0 && target < classes;
    const auto [found, sum] = reduce(row, classes, target);
    const float log_normalizer = found.logits_max + found.log_sum_exp;
    const float factor = (factors.log_sum_exp + factors.square * log_normalizer) / sum;
    const float at_target = has_target ? row[target] * factor + factors.predicted : 0;
    scale(row, classes, factor, out);
    if (has_target) {
        write(at_target, out[target]);
    }
    return found;
}

Statistics default_reduce(const float* const row, const int64_t classes, const int64_t target) {
    return reduce(row, classes, target).statistics;
}

float default_softmax(float* const row, const int64_t classes, const float logits_max) {
    return softmax(row, classes, logits_max);
}

template <class Number>
Statistics default_gradient(float* const row, const int64_t classes, const int64_t target, const Factors& factors,
                            Number* const out) {
    return differentiate(row, classes, target, factors, out);
}

#ifdef __aarch64__
constexpr const char* kDefaultVectors = "NEON";
#else
constexpr const char* kDefaultVectors = "DEFAULT";
#endif
constexpr RowKernels kDefault{kDefaultVectors, default_reduce, default_softmax, default_gradient<float>,
                              default_gradient<BFloat16>};

#ifdef __x86_64__

[[gnu::target("avx2,fma")]] Statistics avx2_reduce(const float* const row, const int64_t classes,
                                                   const int64_t target) {
    return reduce(row, classes, target).statistics;
}

[[gnu::target("avx2,fma")]] float avx2_softmax(float* const row, const int64_t classes, const float logits_max) {
    return softmax(row, classes, logits_max);
}

template <class Number>
[[gnu::target("avx2,fma")]] Statistics avx2_gradient(float* const row, const int64_t classes, const int64_t target,
                                                     const Factors& factors, Number* const out) {
    return differentiate(row, classes, target, factors, out);
}

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")]] Statistics avx512_reduce(
    const float* const row, const int64_t classes, const int64_t target) {
    return reduce(row, classes, target).statistics;
}

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")]] float avx512_softmax(
    float* const row, const int64_t classes, const float logits_max) {
    return softmax(row, classes, logits_max);
}

template <class Number>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")]] Statistics avx512_gradient(
    float* const row, const int64_t classes, const int64_t target, const Factors& factors, Number* const out) {
    return differentiate(row, classes, target, factors, out);
}

constexpr RowKernels kAvx2{"AVX2", avx2_reduce, avx2_softmax, avx2_gradient<float>, avx2_gradient<BFloat16>};
constexpr RowKernels kAvx512{"AVX512", avx512_reduce, avx512_softmax, avx512_gradient<float>,
                             avx512_gradient<BFloat16>};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2();
}

#endif

}  // namespace

const RowKernels& row_kernels(const std::string& capability) {
#ifdef __x86_64__
    // ATEN_CPU_CAPABILITY may select less than the CPU supports. Unknown names denote wider vectors.
    const bool uses_vectors = capability != "DEFAULT" && capability != "NO AVX";
    if (uses_vectors && capability != "AVX2" && has_avx512()) {
        return kAvx512;
    }
    if (uses_vectors && has_avx2()) {
        return kAvx2;
    }
#endif
    static_cast<void>(capability);
    return kDefault;
}

}  // namespace torch_aclnn_ops
