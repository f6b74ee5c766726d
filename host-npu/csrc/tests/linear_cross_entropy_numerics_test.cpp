// Linear cross entropy against an evaluation in double precision.
#include <cmath>
#include <limits>

#include "tests/calls.h"
#include "tests/reference.h"

namespace {

using namespace test;

using Values = std::vector<double>;

// left [rows, depth] x right^T [columns, depth]
Values product(const Values& left, const Values& right, std::int64_t rows, std::int64_t columns, std::int64_t depth) {
    Values result;
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            double sum = 0;
            for (std::int64_t step = 0; step < depth; ++step) {
                sum += left[static_cast<std::size_t>(row * depth + step)] *
                       right[static_cast<std::size_t>(column * depth + step)];
            }
            result.push_back(sum);
        }
    }
    return result;
}

Values transposed(const Values& matrix, std::int64_t rows, std::int64_t columns) {
    Values result;
    for (std::int64_t column = 0; column < columns; ++column) {
        for (std::int64_t row = 0; row < rows; ++row)
            result.push_back(matrix[static_cast<std::size_t>(row * columns + column)]);
    }
    return result;
}

struct Problem {
    aclDataType dtype;
    std::int64_t rows, hidden, vocabulary;
    Values input = random_values(dtype, rows* hidden, -1, 1, 1);
    Values weight = random_values(dtype, vocabulary* hidden, -1, 1, 2);
};

// Sizes around the tiles of 128 x 256 and of the matrix product.
const Problem kProblems[] = {{ACL_FLOAT16, 13, 7, 130}, {ACL_BF16, 150, 33, 300}, {ACL_BF16, 1, 1, 257}};

Values targets_of(const Problem& problem, std::int64_t start) {
    Values targets;
    for (std::int64_t row = 0; row < problem.rows; ++row) {
        targets.push_back(static_cast<double>(start + row * 37 % (problem.vocabulary + 20) - 10));
    }
    return targets;
}

bool in_shard(double target, std::int64_t start, std::int64_t end) {
    return target >= static_cast<double>(start) && target < static_cast<double>(end);
}

void expect_max_sum(const Problem& problem, std::int64_t start) {
    const auto end = start + problem.vocabulary;
    const auto targets = targets_of(problem, start);
    OnlineMaxSum call;
    call.input = {problem.dtype, {problem.rows, problem.hidden}, problem.input};
    call.weight = {problem.dtype, {problem.vocabulary, problem.hidden}, problem.weight};
    call.target = {ACL_INT64, {problem.rows}, targets};
    call.start = start;
    call.end = end;
    for (auto* tensor : {&call.max, &call.sum, &call.predicted}) *tensor = floats({problem.rows}, {-9});
    call.mask = {ACL_UINT8, {(problem.rows + 7) / 8}, {255}};
    call.masked_target = {ACL_INT64, {problem.rows}, {-9}};
    call.logits = {problem.dtype, {problem.rows, problem.vocabulary}};
    run(call);

    const auto exact = product(problem.input, problem.weight, problem.rows, problem.vocabulary, problem.hidden);
    const auto logits = call.logits.values();
    expect_close(logits, exact, epsilon(problem.dtype), "logits");
    // The statistics are of the rounded logits.
    Values max, sum, predicted, masked_target, mask(static_cast<std::size_t>((problem.rows + 7) / 8));
    for (std::size_t row = 0; row < targets.size(); ++row) {
        const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(row) * problem.vocabulary;
        max.push_back(*std::max_element(begin, begin + problem.vocabulary));
        sum.push_back(0);
        for (auto logit = begin; logit != begin + problem.vocabulary; ++logit)
            sum.back() += std::exp(*logit - max.back());
        const bool inside = in_shard(targets[row], start, end);
        const double id = targets[row] - static_cast<double>(start);
        masked_target.push_back(inside ? id : 0);
        predicted.push_back(inside ? begin[static_cast<std::ptrdiff_t>(id)] - max.back() : 0);
        if (!inside) mask[row / 8] += std::ldexp(1, static_cast<int>(row % 8));
    }
    // The bits of no row are those of a target 0.
    for (std::size_t bit = targets.size(); bit < mask.size() * 8; ++bit) {
        if (!in_shard(0, start, end)) mask[bit / 8] += std::ldexp(1, static_cast<int>(bit % 8));
    }
    expect_close(call.max.values(), max, 0, "max");
    expect_close(call.sum.values(), sum, 1e-5, "sum");
    expect_close(call.predicted.values(), predicted, 1e-6, "predicted");
    expect_close(call.masked_target.values(), masked_target, 0, "maskedTarget");
    expect_close(call.mask.values(), mask, 0, "mask");
    // Without logits the statistics are the same.
    call.logits = {};
    run(call);
    expect_close(call.max.values(), max, 0, "max without logits");
}

const Case max_sum{"numerics/fused_linear_online_max_sum", [] {
                       for (const auto& problem : kProblems) {
                           expect_max_sum(problem, 0);
                           expect_max_sum(problem, 1000);
                       }
                   }};

const Case single_precision_ids{"numerics/fused_linear_online_max_sum_compares_in_float32", [] {
                                    OnlineMaxSum call;
                                    call.target = {ACL_INT64, {3}, {16777217, 16777216, 16777215}};
                                    call.masked_target = {ACL_INT64, {3}};
                                    call.start = 16777216;
                                    call.end = 16777217;
                                    run(call);
                                    // In float32 2^24 + 1 is 2^24, so start and end are one number.
                                    expect_close(call.mask.values(), {255}, 0, "mask");
                                }};

const Case single_precision_targets{"numerics/fused_linear_online_max_sum_subtracts_in_float32", [] {
                                        OnlineMaxSum call;
                                        call.target = {ACL_INT64, {3}, {16777216, 16777217, 16777219}};
                                        call.masked_target = {ACL_INT64, {3}};
                                        call.start = 16777216;
                                        call.end = 16777230;
                                        run(call);
                                        // 2^24 + 1 is 2^24, and 2^24 + 3 is 2^24 + 4.
                                        expect_close(call.masked_target.values(), {0, 0, 4}, 0, "maskedTarget");
                                    }};

// The number of columns of a large language model: added one after the other, the sum was 3.5e-4 off.
const Case many_columns{"numerics/fused_linear_online_max_sum_of_many_columns", [] {
                            const Problem problem{ACL_FLOAT16, 2, 1, 151936};
                            OnlineMaxSum call;
                            call.input = {problem.dtype, {problem.rows, 1}, problem.input};
                            call.weight = {problem.dtype, {problem.vocabulary, 1}, problem.weight};
                            call.target = {ACL_INT64, {problem.rows}, {0}};
                            call.end = problem.vocabulary;
                            for (auto* tensor : {&call.max, &call.sum, &call.predicted})
                                *tensor = floats({problem.rows});
                            call.mask = {ACL_UINT8, {1}};
                            call.masked_target = {ACL_INT64, {problem.rows}};
                            call.logits = {problem.dtype, {problem.rows, problem.vocabulary}};
                            run(call);
                            const auto logits = call.logits.values();
                            const auto max = call.max.values();
                            Values sum;
                            for (std::size_t row = 0; row < max.size(); ++row) {
                                const auto begin =
                                    logits.begin() + static_cast<std::ptrdiff_t>(row) * problem.vocabulary;
                                sum.push_back(0);
                                for (auto logit = begin; logit != begin + problem.vocabulary; ++logit) {
                                    sum.back() += std::exp(*logit - max[row]);
                                }
                            }
                            expect_close(call.sum.values(), sum, 2e-7, "sum");
                        }};

const Case nan_logits{"numerics/fused_linear_online_max_sum_of_nan", [] {
                          const double nan = std::numeric_limits<double>::quiet_NaN();
                          // The first, one in the middle, and the last.
                          for (const std::size_t place : {0, 2, 4}) {
                              OnlineMaxSum call;
                              Values weight(20, 1);
                              weight[place * 4] = nan;
                              call.weight = {ACL_FLOAT16, {5, 4}, weight};
                              call.target = {ACL_INT32, {3}, {1}};
                              call.end = 5;
                              run(call);
                              expect_close(call.max.values(), Values(3, nan), 0, "max");
                              expect_close(call.sum.values(), Values(3, nan), 0, "sum");
                              expect_close(call.predicted.values(), Values(3, nan), 0, "predicted");
                          }
                      }};

const Case loss{"numerics/fused_cross_entropy_loss_with_max_sum", [] {
                    constexpr std::int64_t rows = 9, columns = 70;
                    for (const auto dtype : kFloatTypes) {
                        const auto logits = random_values(dtype, rows * columns, -5, 5, 1);
                        const auto max = random_values(ACL_FLOAT, rows, 4, 5, 2),
                                   sum = random_values(ACL_FLOAT, rows, 1, 10, 3);
                        const auto predicted = random_values(ACL_FLOAT, rows, -5, 0, 4);
                        LossWithMaxSum call;
                        call.max = floats({rows}, max);
                        call.sum = floats({rows}, sum);
                        call.predicted = floats({rows}, predicted);
                        call.logits = {dtype, {rows, columns}, logits};
                        call.loss = floats({rows});
                        call.softmax = floats({rows, columns});
                        run(call);
                        Values losses, softmax;
                        for (std::size_t row = 0; row < rows; ++row)
                            losses.push_back(std::log(sum[row]) - predicted[row]);
                        for (std::size_t index = 0; index < logits.size(); ++index) {
                            softmax.push_back(std::exp(logits[index] - max[index / columns]) / sum[index / columns]);
                        }
                        expect_close(call.loss.values(), losses, 1e-6, "loss");
                        expect_close(call.softmax.values(), softmax, 1e-6, "softmax");
                    }
                }};

struct Statistics {
    Values logits;
    Values max = {};
    Values sum = {};
    Values softmax = {};
};

Statistics statistics_of(const Problem& problem) {
    Statistics all{.logits = product(problem.input, problem.weight, problem.rows, problem.vocabulary, problem.hidden)};
    for (auto begin = all.logits.begin(); begin != all.logits.end(); begin += problem.vocabulary) {
        all.max.push_back(*std::max_element(begin, begin + problem.vocabulary));
        all.sum.push_back(0);
        for (auto logit = begin; logit != begin + problem.vocabulary; ++logit) {
            all.sum.back() += std::exp(*logit - all.max.back());
        }
        for (auto logit = begin; logit != begin + problem.vocabulary; ++logit) {
            all.softmax.push_back(std::exp(*logit - all.max.back()) / all.sum.back());
        }
    }
    return all;
}

void expect_gradients(const Problem& problem, bool with_softmax, bool packed_mask) {
    const auto all = statistics_of(problem);
    const auto grad = random_values(ACL_FLOAT, problem.rows, -1, 1, 5);
    Values targets, mask, bytes(static_cast<std::size_t>((problem.rows + 7) / 8 + 1), 170);
    for (std::int64_t row = 0; row < problem.rows; ++row) {
        // The values of masked rows do not matter.
        const bool masked = row % 3 == 1;
        mask.push_back(masked);
        targets.push_back(masked ? -100 : static_cast<double>(row * 41 % problem.vocabulary));
        auto& byte = bytes[static_cast<std::size_t>(row / 8)];
        if (row % 8 == 0) byte = 0;
        if (masked) byte += std::ldexp(1, static_cast<int>(row % 8));
    }
    LossGrad call;
    call.grad = floats({problem.rows}, grad);
    call.input = {problem.dtype, {problem.rows, problem.hidden}, problem.input};
    call.weight = {problem.dtype, {problem.vocabulary, problem.hidden}, problem.weight};
    call.mask = packed_mask ? Tensor(ACL_UINT8, {static_cast<std::int64_t>(bytes.size())}, bytes)
                            : Tensor(ACL_BOOL, {problem.rows}, mask);
    call.masked_target = {ACL_INT64, {problem.rows}, targets};
    call.softmax = with_softmax ? floats({problem.rows, problem.vocabulary}, all.softmax) : Tensor();
    if (!with_softmax) {
        call.max = floats({problem.rows}, all.max);
        call.sum = floats({problem.rows}, all.sum);
    }
    call.input_grad = {problem.dtype, {problem.rows, problem.hidden}};
    call.weight_grad = {problem.dtype, {problem.vocabulary, problem.hidden}};
    run(call);

    auto gradients = all.softmax;
    for (std::size_t row = 0; row < grad.size(); ++row) {
        double* const of_row = &gradients[row * static_cast<std::size_t>(problem.vocabulary)];
        if (mask[row] == 0) of_row[static_cast<std::size_t>(targets[row])] -= 1;
        for (std::int64_t column = 0; column < problem.vocabulary; ++column) of_row[column] *= grad[row];
    }
    // A gradient is rounded to 16 bits before the products.
    const double tolerance = 3 * epsilon(problem.dtype);
    expect_close(call.input_grad.values(),
                 product(gradients, transposed(problem.weight, problem.vocabulary, problem.hidden), problem.rows,
                         problem.hidden, problem.vocabulary),
                 tolerance, "inputGradOut");
    expect_close(call.weight_grad.values(),
                 product(transposed(gradients, problem.rows, problem.vocabulary),
                         transposed(problem.input, problem.rows, problem.hidden), problem.vocabulary, problem.hidden,
                         problem.rows),
                 tolerance, "weightGradOut");
    if (!with_softmax) return;
    // The softmax now holds rows of 16 bits, each beginning at a multiple of 512 bytes.
    const auto memory = call.softmax.memory().download();
    const auto pitch = static_cast<std::size_t>((2 * problem.vocabulary + 511) / 512 * 512);
    for (std::size_t row = 0; row < grad.size(); ++row) {
        const auto begin = memory.begin() + static_cast<std::ptrdiff_t>(row * pitch);
        const auto of_row = gradients.begin() + static_cast<std::ptrdiff_t>(row) * problem.vocabulary;
        expect_close(decode(problem.dtype, {begin, begin + 2 * problem.vocabulary}),
                     {of_row, of_row + problem.vocabulary}, epsilon(problem.dtype), "a packed row");
    }
    // Behind the rows lies what they were made of: the softmax, less 1 at the targets.
    const auto unpacked = call.softmax.values();
    for (auto index = (grad.size() * pitch + 3) / 4; index < unpacked.size(); ++index) {
        const auto row = index / static_cast<std::size_t>(problem.vocabulary);
        const auto column = index % static_cast<std::size_t>(problem.vocabulary);
        const bool is_target = mask[row] == 0 && static_cast<double>(column) == targets[row];
        expect_close({unpacked[index]}, {all.softmax[index] - is_target}, 1e-6, "an element behind the packed rows");
    }
}

const Case loss_grad{"numerics/fused_linear_cross_entropy_loss_grad", [] {
                         for (const auto& problem : kProblems) {
                             for (const bool packed_mask : {false, true}) {
                                 expect_gradients(problem, true, packed_mask);
                                 expect_gradients(problem, false, packed_mask);
                             }
                         }
                     }};

const Case strided_softmax{"numerics/fused_linear_cross_entropy_loss_grad_copies_a_strided_softmax", [] {
                               LossGrad call;
                               call.softmax = {ACL_FLOAT, {3, 130}, {0.5}, {.strides = Shape{1, 3}}};
                               run(call);
                               expect_close(call.softmax.values(), Values(390, 0.5), 0, "the softmax");
                           }};

const Case stray_targets{"numerics/fused_linear_cross_entropy_loss_grad_with_stray_targets", [] {
                             // Outside the softmax it is a fault; without one no tile has the target.
                             LossGrad call;
                             call.masked_target.set({0, -100, 1});
                             expect(launch(call, phase_one(call)) != 0, "target -100 went unnoticed");
                             recent_error();
                             LossGradFromStatistics other;
                             other.masked_target.set({0, -100, 130});
                             run(other);
                         }};

}  // namespace
