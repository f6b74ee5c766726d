// The CPU operators of the linear cross entropy: float32 logits from bfloat16 matrices, and row kernels.
//
// torch's bfloat16 matrix product rounds to bfloat16, which loses three digits of the loss. oneDNN's brgemm, which
// torch uses for attention, computes one tile with float32 accumulation and native bfloat16 instructions. This file
// splits a product into such tiles.

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "linear_cross_entropy_rows.h"

namespace torch_aclnn_ops {
namespace {

// Two adjacent features, as the bfloat16 instructions require.
using Pair = std::array<at::BFloat16, 2>;

// A panel of classes is packed once and stays in the L2 cache while it is multiplied with all rows.
constexpr int64_t kClasses = 128;
constexpr int64_t kRows = 256;
constexpr int64_t kFeatures = 512;

void check(const at::Tensor& tensor, const char* const name, const at::ScalarType dtype, const at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.sizes() == shape &&
                          (tensor.dim() == 0 || tensor.size(-1) < 2 || tensor.stride(-1) == 1),
                      "linear_cross_entropy: ", name, " must have dtype ", dtype, ", shape ", shape,
                      " and contiguous rows, but it has dtype ", tensor.scalar_type(), ", shape ", tensor.sizes(),
                      " and strides ", tensor.strides());
}

// Transposes a matrix of four rows and four columns.
void transpose(const at::BFloat16* const from, const int64_t stride, Pair* const to, const int64_t to_stride) {
#ifdef __SSE__
    const auto load = [&](const int64_t row) {
        return _mm_loadu_ps(reinterpret_cast<const float*>(from + row * stride));
    };
    __m128 first = load(0), second = load(1), third = load(2), fourth = load(3);
    _MM_TRANSPOSE4_PS(first, second, third, fourth);
    _mm_storeu_ps(reinterpret_cast<float*>(to), first);
    _mm_storeu_ps(reinterpret_cast<float*>(to + to_stride), second);
    _mm_storeu_ps(reinterpret_cast<float*>(to + 2 * to_stride), third);
    _mm_storeu_ps(reinterpret_cast<float*>(to + 3 * to_stride), fourth);
#else
    for (int64_t column = 0; column < 4; ++column) {
        for (int64_t row = 0; row < 4; ++row) {
            std::memcpy(to + column * to_stride + row, from + row * stride + 2 * column, sizeof(Pair));
        }
    }
#endif
}

// Packs the transpose of some rows of the head: a pair of each class, then the next pair of each class.
void pack(const at::BFloat16* const weight, const int64_t stride, const int64_t classes, const int64_t features,
          std::vector<Pair>& panel) {
    constexpr int64_t kTile = 4, kBlock = 16;  // rows that are read side by side
    const int64_t pairs = features / 2, whole_rows = classes / kTile * kTile, whole_pairs = pairs / kTile * kTile;
    for (int64_t first = 0; first < whole_rows; first += kBlock) {
        const int64_t last = std::min(first + kBlock, whole_rows);
        for (int64_t pair = 0; pair < whole_pairs; pair += kTile) {
            for (int64_t row = first; row < last; row += kTile) {
                transpose(weight + row * stride + 2 * pair, stride, &panel[pair * classes + row], classes);
            }
        }
    }
    for (int64_t row = 0; row < classes; ++row) {
        for (int64_t pair = row < whole_rows ? whole_pairs : 0; pair < pairs; ++pair) {
            std::memcpy(&panel[pair * classes + row], weight + row * stride + 2 * pair, sizeof(Pair));
        }
    }
}

// Multiplies all rows of the input with a packed panel of the head.
void multiply(const at::BFloat16* const input, const int64_t input_stride, const std::vector<Pair>& panel,
              const int64_t rows, const int64_t classes, const int64_t features, float* const out,
              const int64_t out_stride) {
    for (int64_t row = 0; row < rows; row += kRows) {
        for (int64_t feature = 0; feature < features; feature += kFeatures) {
            const bool adds = feature > 0;
            at::native::cpublas::brgemm(std::min(kRows, rows - row), classes, std::min(kFeatures, features - feature),
                                        input_stride, classes, out_stride, adds, input + row * input_stride + feature,
                                        panel[feature / 2 * classes].data(), out + row * out_stride);
        }
    }
}

void check_products(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& out) {
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) > 0 && weight.size(1) % 2 == 0,
                      "linear_cross_entropy: weight must have two dimensions and an even number of features, but it "
                      "has shape ",
                      weight.sizes());
    check(weight, "weight", at::kBFloat16, weight.sizes());
    const int64_t rows = input.dim() == 0 ? 0 : input.size(0);
    check(input, "input", at::kBFloat16, {rows, weight.size(1)});
    check(out, "out", at::kFloat, {rows, weight.size(0)});
}

// Writes input @ weight.T to out.
void logits(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& out) {
    check_products(input, weight, out);
    const int64_t rows = input.size(0), classes = weight.size(0), features = weight.size(1);
    const auto* const from = input.const_data_ptr<at::BFloat16>();
    const auto* const head = weight.const_data_ptr<at::BFloat16>();
    auto* const to = out.data_ptr<float>();
    at::parallel_for(0, (classes + kClasses - 1) / kClasses, 1, [&](const int64_t begin, const int64_t end) {
        std::vector<Pair> panel(kClasses * features / 2);
        for (int64_t first = begin * kClasses; first < std::min(end * kClasses, classes); first += kClasses) {
            const int64_t number = std::min(kClasses, classes - first);
            pack(head + first * weight.stride(0), weight.stride(0), number, features, panel);
            multiply(from, input.stride(0), panel, rows, number, features, to + first, out.stride(0));
        }
        at::native::cpublas::brgemm_release();
    });
}

const RowKernels& kernels() {
    static const RowKernels& kernels = row_kernels(at::get_cpu_capability());
    return kernels;
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

// Overwrites logits with their softmax, and returns log sum exp(logits - logits_max).
at::Tensor softmax(const at::Tensor& logits, const at::Tensor& logits_max) {
    const at::Tensor log_sum_exp = check_softmax(logits, logits_max);
    const int64_t classes = logits.size(1), stride = logits.stride(0);
    auto* const values = logits.data_ptr<float>();
    auto* const to = log_sum_exp.data_ptr<float>();
    const auto* const maxima = logits_max.const_data_ptr<float>();
    at::parallel_for(0, logits.size(0), 1, [&](const int64_t begin, const int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            to[row] = kernels().softmax(values + row * stride, classes, maxima[row]);
        }
    });
    return log_sum_exp;
}

using RowStatistics = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

RowStatistics check_statistics(const at::Tensor& logits, const at::Tensor& target) {
    check_logits(logits);
    check(target, "target", at::kLong, {logits.size(0)});
    return {new_statistic(logits), new_statistic(logits), new_statistic(logits)};
}

// Calls a function with the index of every row, which returns the statistics of the row.
template <class Function>
void for_each_row(const RowStatistics& statistics, const Function& function) {
    auto* const maxima = std::get<0>(statistics).data_ptr<float>();
    auto* const sums = std::get<1>(statistics).data_ptr<float>();
    auto* const predicted = std::get<2>(statistics).data_ptr<float>();
    at::parallel_for(0, std::get<0>(statistics).size(0), 1, [&](const int64_t begin, const int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const Statistics found = function(row);
            maxima[row] = found.logits_max;
            sums[row] = found.log_sum_exp;
            predicted[row] = found.predicted;
        }
    });
}

// Returns the statistics of rows of logits.
RowStatistics statistics(const at::Tensor& logits, const at::Tensor& target) {
    RowStatistics statistics = check_statistics(logits, target);
    const int64_t classes = logits.size(1), stride = logits.stride(0);
    const auto* const values = logits.const_data_ptr<float>();
    const auto* const targets = target.const_data_ptr<int64_t>();
    for_each_row(statistics,
                 [&](const int64_t row) { return kernels().reduce(values + row * stride, classes, targets[row]); });
    return statistics;
}

RowStatistics check_gradient(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& grad_log_sum_exp,
                             const at::Tensor& grad_predicted, const std::optional<at::Tensor>& grad_square,
                             const at::Tensor& out) {
    RowStatistics statistics = check_statistics(logits, target);
    const std::array<int64_t, 1> rows{logits.size(0)};
    check(grad_log_sum_exp, "grad_log_sum_exp", at::kFloat, rows);
    check(grad_predicted, "grad_predicted", at::kFloat, rows);
    if (grad_square.has_value()) {
        check(*grad_square, "grad_square", at::kFloat, rows);
    }
    TORCH_CHECK_VALUE(out.scalar_type() == at::kFloat || out.scalar_type() == at::kBFloat16,
                      "linear_cross_entropy: out must have dtype Float or BFloat16, but it has ", out.scalar_type());
    check(out, "out", out.scalar_type(), logits.sizes());
    return statistics;
}

// Writes the gradient of logits to out, which may alias them, and overwrites them; returns the row statistics.
RowStatistics gradient(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& grad_log_sum_exp,
                       const at::Tensor& grad_predicted, const std::optional<at::Tensor>& grad_square,
                       const at::Tensor& out) {
    RowStatistics statistics = check_gradient(logits, target, grad_log_sum_exp, grad_predicted, grad_square, out);
    const int64_t classes = logits.size(1), stride = logits.stride(0), out_stride = out.stride(0);
    const bool is_float = out.scalar_type() == at::kFloat;
    auto* const values = logits.data_ptr<float>();
    auto* const to = out.data_ptr();
    const auto* const targets = target.const_data_ptr<int64_t>();
    const auto* const log_sum_exp = grad_log_sum_exp.const_data_ptr<float>();
    const auto* const predicted = grad_predicted.const_data_ptr<float>();
    const auto* const square = grad_square.has_value() ? grad_square->const_data_ptr<float>() : nullptr;
    for_each_row(statistics, [&](const int64_t row) {
        const Factors factors{log_sum_exp[row], predicted[row], square == nullptr ? 0 : square[row]};
        float* const row_values = values + row * stride;
        return is_float ? kernels().float_gradient(row_values, classes, targets[row], factors,
                                                   static_cast<float*>(to) + row * out_stride)
                        : kernels().bfloat16_gradient(row_values, classes, targets[row], factors,
                                                      static_cast<BFloat16*>(to) + row * out_stride);
    });
    return statistics;
}

// Returns a float32 loss and its needed gradients in one call, because calls dominate the time of small problems. The
// loss is empty if a target is invalid or ignored.
std::tuple<at::Tensor, at::Tensor, at::Tensor> loss(const at::Tensor& input, const at::Tensor& weight,
                                                    const at::Tensor& target, const int64_t ignore_index,
                                                    const bool mean, const bool needs_input_grad,
                                                    const bool needs_weight_grad) {
    TORCH_CHECK_VALUE(input.dim() == 2 && weight.dim() == 2,
                      "linear_cross_entropy: input and weight must have two dimensions, but have shapes ",
                      input.sizes(), " and ", weight.sizes());
    const int64_t rows = input.size(0), classes = weight.size(0);
    TORCH_CHECK_VALUE(input.scalar_type() == at::kFloat,
                      "linear_cross_entropy: input must have dtype Float, but it has ", input.scalar_type());
    TORCH_CHECK_VALUE(weight.scalar_type() == at::kFloat && classes > 0 && weight.size(1) == input.size(1),
                      "linear_cross_entropy: weight must have dtype Float and shape ",
                      at::IntArrayRef({classes, input.size(1)}), ", but it has dtype ", weight.scalar_type(),
                      " and shape ", weight.sizes());
    const at::Tensor indices = target.contiguous();
    check(indices, "target", at::kLong, {rows});
    const auto* const targets = indices.const_data_ptr<int64_t>();
    if (!std::all_of(targets, targets + rows,
                     [&](const int64_t index) { return index >= 0 && index < classes && index != ignore_index; })) {
        return {at::empty({0}, input.options()), {}, {}};
    }
    const at::Tensor logits = at::mm(input, weight.t());
    auto* const values = logits.data_ptr<float>();
    const float factor = mean ? 1 / static_cast<float>(rows) : 1;
    std::vector<float> losses(rows);
    at::parallel_for(0, rows, 1, [&](const int64_t begin, const int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            float* const row_values = values + row * classes;
            const Statistics found =
                kernels().float_gradient(row_values, classes, targets[row], Factors{factor, -factor, 0}, row_values);
            losses[row] = found.log_sum_exp - found.predicted;
        }
    });
    const double sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    const at::Tensor result = at::empty({}, input.options());
    *result.data_ptr<float>() = static_cast<float>(mean ? sum / static_cast<double>(rows) : sum);
    return {result, needs_input_grad ? at::mm(logits, weight) : at::Tensor(),
            needs_weight_grad ? at::mm(logits.t(), input) : at::Tensor()};
}

// Returns the meta tensors of the loss and its gradients.
std::tuple<at::Tensor, at::Tensor, at::Tensor> shapes_of_loss(const at::Tensor& input, const at::Tensor& weight,
                                                              const at::Tensor&, int64_t, bool,
                                                              const bool needs_input_grad,
                                                              const bool needs_weight_grad) {
    return {at::empty({}, input.options()), needs_input_grad ? at::empty_like(input) : at::Tensor(),
            needs_weight_grad ? at::empty_like(weight) : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_aclnn_ops, library) {
    library.def("linear_cross_entropy_logits(Tensor input, Tensor weight, Tensor(a!) out) -> ()");
    library.impl("linear_cross_entropy_logits", c10::DispatchKey::CPU, TORCH_FN(logits));
    library.impl("linear_cross_entropy_logits", c10::DispatchKey::Meta, TORCH_FN(check_products));
    library.def(
        "linear_cross_entropy_logits_statistics(Tensor logits, Tensor target)"
        " -> (Tensor logits_max, Tensor log_sum_exp, Tensor predicted)");
    library.impl("linear_cross_entropy_logits_statistics", c10::DispatchKey::CPU, TORCH_FN(statistics));
    library.impl("linear_cross_entropy_logits_statistics", c10::DispatchKey::Meta, TORCH_FN(check_statistics));
    library.def("linear_cross_entropy_softmax(Tensor(a!) logits, Tensor logits_max) -> Tensor");
    library.impl("linear_cross_entropy_softmax", c10::DispatchKey::CPU, TORCH_FN(softmax));
    library.impl("linear_cross_entropy_softmax", c10::DispatchKey::Meta, TORCH_FN(check_softmax));
    library.def(
        "linear_cross_entropy_logits_gradient(Tensor(a!) logits, Tensor target, Tensor grad_log_sum_exp,"
        " Tensor grad_predicted, Tensor? grad_square, Tensor(b!) out)"
        " -> (Tensor logits_max, Tensor log_sum_exp, Tensor predicted)");
    library.impl("linear_cross_entropy_logits_gradient", c10::DispatchKey::CPU, TORCH_FN(gradient));
    library.impl("linear_cross_entropy_logits_gradient", c10::DispatchKey::Meta, TORCH_FN(check_gradient));
    library.def(
        "linear_cross_entropy_loss(Tensor input, Tensor weight, Tensor target, int ignore_index, bool mean,"
        " bool needs_input_grad, bool needs_weight_grad) -> (Tensor loss, Tensor input_grad, Tensor weight_grad)");
    library.impl("linear_cross_entropy_loss", c10::DispatchKey::CPU, TORCH_FN(loss));
    library.impl("linear_cross_entropy_loss", c10::DispatchKey::Meta, TORCH_FN(shapes_of_loss));
}

}  // namespace torch_aclnn_ops
