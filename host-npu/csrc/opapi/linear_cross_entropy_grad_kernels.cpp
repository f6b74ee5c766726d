// aclnnFusedLinearCrossEntropyLossGrad: the arithmetic.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#include "opapi/elements.h"
#include "opapi/gemm.h"
#include "opapi/linear_cross_entropy_grad.h"

namespace host_npu::linear_cross_entropy_grad {
namespace {

// The alignment of the packed rows of the softmax, in bytes.
constexpr std::int64_t kRowAlignment = 512;
constexpr std::int64_t kTileRows = 128;
constexpr std::int64_t kTileColumns = 256;

// Whether each row's target is in another shard of the vocabulary.
std::vector<bool> is_masked(const KernelArguments& arguments) {
    const auto& mask = arguments[kTargetMask];
    const auto flags = read_all<std::uint8_t>(mask);
    std::vector<bool> masked(static_cast<std::size_t>(arguments[kGrad]->numel()));
    for (std::size_t row = 0; row < masked.size(); ++row) {
        masked[row] = mask->dtype == ACL_BOOL ? flags[row] != 0 : (flags[row / 8] >> row % 8 & 1) != 0;
    }
    return masked;
}

// The inputs of both kernels.
struct Problem {
    explicit Problem(const KernelArguments& arguments)
        : dtype(arguments[kInput]->dtype),
          rows(arguments[kInput]->shape[0]),
          hidden(arguments[kInput]->shape[1]),
          vocabulary(arguments[kWeight]->shape[0]),
          grad(read_all<float>(arguments[kGrad])),
          input(read_all<float>(arguments[kInput])),
          weight(read_all<float>(arguments[kWeight])),
          targets(read_all<std::int64_t>(arguments[kMaskedTarget])),
          masked(is_masked(arguments)) {}

    aclDataType dtype;
    std::int64_t rows;
    std::int64_t hidden;
    std::int64_t vocabulary;
    std::vector<float> grad;
    std::vector<float> input;
    std::vector<float> weight;
    std::vector<std::int64_t> targets;
    std::vector<bool> masked;
};

// Packs the rows of a contiguous softmax, which now holds gradients, to 16 bits in place. With at least 128 columns, a
// packed row never extends beyond its own row in float32.
void pack_rows(const HostTensor& softmax, const std::vector<float>& gradients, aclDataType dtype) {
    const auto columns = softmax->shape[1];
    const auto pitch = (2 * columns + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
    Layout row;
    row.shape = Dims{columns};
    row.strides = Dims{1};
    row.dtype = dtype;
    for (std::int64_t index = 0; index < softmax->shape[0]; ++index) {
        Elements({&row, softmax.data + index * pitch})
            .write(&gradients[static_cast<std::size_t>(index * columns)], columns);
    }
}

// Takes an accumulator of the memory-friendly mode from the workspace.
std::span<float> take(std::span<std::byte>& workspace, std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
    const std::span floats(reinterpret_cast<float*>(workspace.data()), static_cast<std::size_t>(count));
    workspace = workspace.subspan(bytes);
    std::fill(floats.begin(), floats.end(), 0.0f);
    return floats;
}

// Turns the logits of a tile into gradients. `tile` begins at (first_row, first_column).
void differentiate(const Problem& problem, const std::vector<float>& max, const std::vector<float>& sum,
                   std::int64_t first_row, std::int64_t rows, std::int64_t first_column, std::int64_t columns,
                   float* tile) {
    for (std::int64_t index = 0; index < rows; ++index) {
        const auto row = static_cast<std::size_t>(first_row + index);
        float* const gradient = tile + index * columns;
        for (std::int64_t column = 0; column < columns; ++column) {
            gradient[column] = std::exp(gradient[column] - max[row]) / sum[row];
        }
        const auto target = problem.targets[row] - first_column;
        if (!problem.masked[row] && target >= 0 && target < columns) gradient[target] -= 1.0f;
        for (std::int64_t column = 0; column < columns; ++column) gradient[column] *= problem.grad[row];
    }
    round_to(problem.dtype, tile, rows * columns);
}

void subtract_targets(const Problem& problem, std::vector<float>& softmax) {
    for (std::size_t row = 0; row < problem.targets.size(); ++row) {
        if (problem.masked[row]) continue;
        const auto target = problem.targets[row];
        // The device would write outside the row.
        if (target < 0 || target >= problem.vocabulary) {
            throw std::out_of_range("unmasked target " + std::to_string(target) + " of row " + std::to_string(row) +
                                    " is outside the " + std::to_string(problem.vocabulary) +
                                    " columns of the softmax");
        }
        softmax[row * static_cast<std::size_t>(problem.vocabulary) + static_cast<std::size_t>(target)] -= 1.0f;
    }
}

}  // namespace

void from_softmax(const KernelArguments& arguments) {
    const Problem problem(arguments);
    const auto vocabulary = problem.vocabulary;
    const auto& softmax = arguments[kSoftmax];
    auto gradients = read_all<float>(softmax);
    subtract_targets(problem, gradients);
    // Written back before the rows are packed; the remainder of the memory keeps these values.
    if (softmax->contiguous()) write_all(softmax, gradients);
    for (std::int64_t row = 0; row < problem.rows; ++row) {
        float* const gradient = &gradients[static_cast<std::size_t>(row * vocabulary)];
        for (std::int64_t column = 0; column < vocabulary; ++column) {
            gradient[column] *= problem.grad[static_cast<std::size_t>(row)];
        }
    }
    round_to(problem.dtype, gradients.data(), static_cast<std::int64_t>(gradients.size()));
    // A strided softmax is copied first, so the caller's tensor is not packed.
    if (softmax->contiguous()) pack_rows(softmax, gradients, problem.dtype);

    const auto by_row = rows_of(gradients.data(), vocabulary);
    std::vector<float> input_grad(problem.input.size()), weight_grad(problem.weight.size());
    multiply_add(by_row, rows_of(problem.weight.data(), problem.hidden), problem.rows, problem.hidden, vocabulary,
                 input_grad.data(), problem.hidden);
    multiply_add(by_row.transposed(), rows_of(problem.input.data(), problem.hidden), vocabulary, problem.hidden,
                 problem.rows, weight_grad.data(), problem.hidden);
    write_all(arguments[kInputGrad], input_grad);
    write_all(arguments[kWeightGrad], weight_grad);
}

void from_statistics(const KernelArguments& arguments) {
    const Problem problem(arguments);
    const auto hidden = problem.hidden;
    const auto max = read_all<float>(arguments[kLogitsMax]);
    const auto sum = read_all<float>(arguments[kSumExpLogits]);
    auto workspace = arguments.workspace;
    const auto input_grad = take(workspace, problem.rows * hidden);
    const auto weight_grad = take(workspace, problem.vocabulary * hidden);

    for (std::int64_t column = 0; column < problem.vocabulary; column += kTileColumns) {
        const auto columns = std::min(kTileColumns, problem.vocabulary - column);
        const auto weight = rows_of(&problem.weight[static_cast<std::size_t>(column * hidden)], hidden);
        for (std::int64_t row = 0; row < problem.rows; row += kTileRows) {
            const auto rows = std::min(kTileRows, problem.rows - row);
            const auto input = rows_of(&problem.input[static_cast<std::size_t>(row * hidden)], hidden);
            auto rest = workspace;
            const auto tile = take(rest, rows * columns);
            multiply_add(input, weight.transposed(), rows, columns, hidden, tile.data(), columns);
            differentiate(problem, max, sum, row, rows, column, columns, tile.data());
            const auto gradients = rows_of(tile.data(), columns);
            multiply_add(gradients, weight, rows, hidden, columns, &input_grad[static_cast<std::size_t>(row * hidden)],
                         hidden);
            multiply_add(gradients.transposed(), input, columns, hidden, rows,
                         &weight_grad[static_cast<std::size_t>(column * hidden)], hidden);
        }
    }
    Elements(arguments[kInputGrad]).write(input_grad.data(), problem.rows * hidden);
    Elements(arguments[kWeightGrad]).write(weight_grad.data(), problem.vocabulary * hidden);
}

}  // namespace host_npu::linear_cross_entropy_grad
