// The rows of logits reduced, and turned to the softmax or to their own gradient, in one go.
//
// A row of logits is as large as a processor's second-level cache can hold. torch's calls pass over all rows, from main
// memory, once for each of: maximum, exponentials, their sum, its reciprocal, the gradient and its rounding. Here all
// of it is done to a row before the next one is read.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>

namespace torch_aclnn_ops {
namespace {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vector::size();

// e^x = 2^n e^r with n the integer nearest to x / ln 2, so that |r| <= ln 2 / 2, where eight terms of the series are
// exact to r^8 / 8! < 6e-9. ln 2 is split in two, of which the first has so few digits that its product with n is
// exact.
Vector exponential(const Vector& x) {
    const __m512 lowest = _mm512_set1_ps(-104);  // becomes 0, as less does; the second operand, which may be nan, wins
    const __m512 bounded = _mm512_max_ps(lowest, x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504F)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375F), bounded);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4F), r);
    __m512 sum = _mm512_set1_ps(1.F / 5040);
    for (const float inverse_factorial : {1.F / 720, 1.F / 120, 1.F / 24, 1.F / 6, 1.F / 2, 1.F, 1.F}) {
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(inverse_factorial));
    }
    return _mm512_scalef_ps(sum, n);
}

float maximum_of(const float* const row, const int64_t classes) {
    const auto larger = [](const Vector& left, const Vector& right) { return at::vec::maximum(left, right); };
    return at::vec::reduce_all<float>(larger, row, classes);  // nan if there is one
}

// Turns logits z to exp(z - maximum), and returns the sum.
float exponentiate(float* const row, const int64_t classes, const float maximum) {
    constexpr int64_t kSums = 4;  // additions that do not wait for each other, and shorter sums
    std::array<Vector, kSums> sums{};
    int64_t place = 0;
    for (; place + kSums * kLanes <= classes; place += kSums * kLanes) {
        for (int64_t sum = 0; sum < kSums; ++sum) {
            float* const at = row + place + sum * kLanes;
            const Vector power = exponential(Vector::loadu(at) - Vector(maximum));
            power.store(at);
            sums[sum] = sums[sum] + power;
        }
    }
    float total = at::vec::vec_reduce_all(std::plus<Vector>(), (sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; place < classes; place += kLanes) {
        const int64_t count = std::min(kLanes, classes - place);
        const Vector power = exponential(Vector::loadu(row + place, count) - Vector(maximum));
        power.store(row + place, count);
        for (int64_t lane = place; lane < place + count; ++lane) {
            total += row[lane];
        }
    }
    return total;
}

void scale(const float* const row, const int64_t classes, const float factor, float* const out) {
    at::vec::map([factor](const Vector& value) { return value * Vector(factor); }, out, row, classes);
}

void scale(const float* const row, const int64_t classes, const float factor, at::BFloat16* const out) {
    const Vector factors(factor);
    int64_t place = 0;
    for (; place + 2 * kLanes <= classes; place += 2 * kLanes) {
        at::vec::convert_from_float<at::BFloat16>(Vector::loadu(row + place) * factors,
                                                  Vector::loadu(row + place + kLanes) * factors)
            .store(out + place);
    }
    for (; place < classes; ++place) {
        out[place] = static_cast<at::BFloat16>(row[place] * factor);
    }
}

// The factors of a row's statistics in the derivative of the loss by its logits z:
// (log_sum_exp + square * logsumexp(z)) * softmax(z) + predicted * onehot(target).
struct Factors {
    float log_sum_exp;
    float predicted;
    float square;
};

struct Statistics {
    float logits_max;
    float log_sum_exp;  // log sum exp(z - logits_max)
    float predicted;    // z[target] - logits_max
};

template <class Number>
Statistics differentiate(float* const row, const int64_t classes, const int64_t target, const Factors& factors,
                         Number* const out) {
    const bool has_target = target >= 0 && target < classes;
    const float maximum = maximum_of(row, classes);
    const float predicted = has_target ? row[target] - maximum : 0;
    const float sum = exponentiate(row, classes, maximum);
    const float log_sum_exp = std::log(sum);
    const float factor = (factors.log_sum_exp + factors.square * (maximum + log_sum_exp)) / sum;
    const float at_target = has_target ? row[target] * factor + factors.predicted : 0;
    scale(row, classes, factor, out);
    if (has_target) {
        out[target] = static_cast<Number>(at_target);
    }
    return {maximum, log_sum_exp, predicted};
}

void check(const at::Tensor& tensor, const char* const name, const at::ScalarType dtype, const at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.sizes() == shape &&
                          (tensor.dim() == 0 || tensor.size(-1) < 2 || tensor.stride(-1) == 1),
                      "linear_cross_entropy: ", name, " must have dtype ", dtype, ", shape ", shape,
                      " and contiguous rows, but it has dtype ", tensor.scalar_type(), ", shape ", tensor.sizes(),
                      " and strides ", tensor.strides());
}

void check_logits(const at::Tensor& logits) {
    TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0,
                      "linear_cross_entropy: logits must have two dimensions and at least one class, but have shape ",
                      logits.sizes());
    check(logits, "logits", at::kFloat, logits.sizes());
}

at::Tensor new_statistic(const at::Tensor& logits) { return at::empty({logits.size(0)}, logits.options()); }

at::Tensor check_softmax(const at::Tensor& logits, const at::Tensor& logits_max) {
    check_logits(logits);
    check(logits_max, "logits_max", at::kFloat, {logits.size(0)});
    return new_statistic(logits);
}

// Turns logits to their softmax, and returns log sum exp(logits - logits_max).
at::Tensor softmax(const at::Tensor& logits, const at::Tensor& logits_max) {
    const at::Tensor log_sum_exp = check_softmax(logits, logits_max);
    const int64_t classes = logits.size(1), stride = logits.stride(0);
    auto* const values = logits.data_ptr<float>();
    auto* const to = log_sum_exp.data_ptr<float>();
    const auto* const maxima = logits_max.const_data_ptr<float>();
    at::parallel_for(0, logits.size(0), 1, [&](const int64_t begin, const int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            float* const of_row = values + row * stride;
            const float sum = exponentiate(of_row, classes, maxima[row]);
            scale(of_row, classes, 1 / sum, of_row);
            to[row] = std::log(sum);
        }
    });
    return log_sum_exp;
}

using OfRows = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

OfRows check_gradient(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& of_log_sum_exp,
                      const at::Tensor& of_predicted, const std::optional<at::Tensor>& of_square,
                      const at::Tensor& out) {
    check_logits(logits);
    const std::array<int64_t, 1> rows{logits.size(0)};
    check(target, "target", at::kLong, rows);
    check(of_log_sum_exp, "of_log_sum_exp", at::kFloat, rows);
    check(of_predicted, "of_predicted", at::kFloat, rows);
    if (of_square.has_value()) {
        check(*of_square, "of_square", at::kFloat, rows);
    }
    TORCH_CHECK_VALUE(out.scalar_type() == at::kFloat || out.scalar_type() == at::kBFloat16,
                      "linear_cross_entropy: out must have dtype Float or BFloat16, but it has ", out.scalar_type());
    check(out, "out", out.scalar_type(), logits.sizes());
    return {new_statistic(logits), new_statistic(logits), new_statistic(logits)};
}

template <class Number>
void write_gradient(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& of_log_sum_exp,
                    const at::Tensor& of_predicted, const std::optional<at::Tensor>& of_square, const at::Tensor& out,
                    const OfRows& of_rows) {
    const int64_t classes = logits.size(1), stride = logits.stride(0), out_stride = out.stride(0);
    auto* const values = logits.data_ptr<float>();
    auto* const to = out.data_ptr<Number>();
    const auto* const targets = target.const_data_ptr<int64_t>();
    const auto* const log_sum_exp = of_log_sum_exp.const_data_ptr<float>();
    const auto* const predicted = of_predicted.const_data_ptr<float>();
    const auto* const square = of_square.has_value() ? of_square->const_data_ptr<float>() : nullptr;
    auto* const maxima = std::get<0>(of_rows).data_ptr<float>();
    auto* const sums = std::get<1>(of_rows).data_ptr<float>();
    auto* const at_targets = std::get<2>(of_rows).data_ptr<float>();
    at::parallel_for(0, logits.size(0), 1, [&](const int64_t begin, const int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const Factors factors{log_sum_exp[row], predicted[row], square == nullptr ? 0 : square[row]};
            const Statistics found =
                differentiate(values + row * stride, classes, targets[row], factors, to + row * out_stride);
            maxima[row] = found.logits_max;
            sums[row] = found.log_sum_exp;
            at_targets[row] = found.predicted;
        }
    });
}

// Writes the gradient of logits, which are overwritten and may be where it is written; returns the statistics of rows.
OfRows gradient(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& of_log_sum_exp,
                const at::Tensor& of_predicted, const std::optional<at::Tensor>& of_square, const at::Tensor& out) {
    OfRows of_rows = check_gradient(logits, target, of_log_sum_exp, of_predicted, of_square, out);
    if (out.scalar_type() == at::kFloat) {
        write_gradient<float>(logits, target, of_log_sum_exp, of_predicted, of_square, out, of_rows);
    } else {
        write_gradient<at::BFloat16>(logits, target, of_log_sum_exp, of_predicted, of_square, out, of_rows);
    }
    return of_rows;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_aclnn_ops, library) {
    library.def("linear_cross_entropy_softmax(Tensor(a!) logits, Tensor logits_max) -> Tensor");
    library.impl("linear_cross_entropy_softmax", c10::DispatchKey::CPU, TORCH_FN(softmax));
    library.impl("linear_cross_entropy_softmax", c10::DispatchKey::Meta, TORCH_FN(check_softmax));
    library.def(
        "linear_cross_entropy_logits_gradient(Tensor(a!) logits, Tensor target, Tensor of_log_sum_exp,"
        " Tensor of_predicted, Tensor? of_square, Tensor(b!) out)"
        " -> (Tensor logits_max, Tensor log_sum_exp, Tensor predicted)");
    library.impl("linear_cross_entropy_logits_gradient", c10::DispatchKey::CPU, TORCH_FN(gradient));
    library.impl("linear_cross_entropy_logits_gradient", c10::DispatchKey::Meta, TORCH_FN(check_gradient));
}

}  // namespace torch_aclnn_ops
