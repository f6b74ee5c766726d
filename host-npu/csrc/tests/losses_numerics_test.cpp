// The losses against an evaluation in double precision.
#include "tests/calls.h"
#include "tests/reference.h"

namespace {

using namespace test;

struct Operand {
    Shape shape;
    std::vector<double> values;

    double at(const Shape& to, std::int64_t flat) const { return values[broadcast_index(shape, to, flat)]; }
};

Operand random(aclDataType dtype, const Shape& shape, double low, double high, unsigned seed) {
    return {shape, random_values(dtype, numel(shape), low, high, seed)};
}

struct Shapes {
    Shape grad, self, target, out;
};

const Shapes kShapes[] = {{{3, 5}, {3, 5}, {3, 5}, {3, 5}},
                          {{}, {7, 300}, {7, 300}, {7, 300}},
                          {{2, 2, 3, 2}, {1, 2, 3, 2}, {2, 2, 1, 2}, {2, 2, 3, 2}},
                          {{}, {}, {}, {}},
                          {{1}, {4, 1}, {5}, {4, 5}}};

// A tensor of `operand`, whose last two dimensions are stored the other way round, one element into the storage.
Tensor transposed(aclDataType dtype, const Operand& operand) {
    const auto rank = operand.shape.size();
    if (rank < 2) return {dtype, operand.shape, operand.values};
    const auto rows = operand.shape[rank - 2], columns = operand.shape[rank - 1];
    Shape strides(rank);
    for (std::int64_t stride = 1, index = static_cast<std::int64_t>(rank) - 1; index >= 0; --index) {
        strides[static_cast<std::size_t>(index)] = stride;
        stride *= operand.shape[static_cast<std::size_t>(index)];
    }
    strides[rank - 2] = 1;
    strides[rank - 1] = rows;
    std::vector<double> values(operand.values.size() + 1);
    for (std::int64_t flat = 0; flat < numel(operand.shape); ++flat) {
        const auto matrix = flat / (rows * columns), row = flat / columns % rows, column = flat % columns;
        values[static_cast<std::size_t>(1 + matrix * rows * columns + column * rows + row)] =
            operand.values[static_cast<std::size_t>(flat)];
    }
    return {
        dtype, operand.shape, values, {.strides = strides, .offset = 1, .storage = Shape{numel(operand.shape) + 1}}};
}

void expect_backward(const Shapes& shapes, aclDataType dtype, std::int64_t reduction, bool strided) {
    const auto grad = random(dtype, shapes.grad, -2, 2, 1), self = random(dtype, shapes.self, -3, 3, 2);
    const auto target = random(dtype, shapes.target, -3, 3, 3);
    const auto make = [&](const Operand& operand) {
        return strided ? transposed(dtype, operand) : Tensor(dtype, operand.shape, operand.values);
    };
    MseLossBackward call;
    call.grad = make(grad);
    call.self = make(self);
    call.target = make(target);
    call.out = {dtype, shapes.out};
    call.reduction = reduction;
    run(call);
    // A mean is over self, not over what it broadcasts to.
    const double scale = reduction == 1 ? 2.0 / static_cast<double>(numel(shapes.self)) : 2.0;
    std::vector<double> expected;
    for (std::int64_t flat = 0; flat < numel(shapes.out); ++flat) {
        const double difference = self.at(shapes.out, flat) - target.at(shapes.out, flat);
        expected.push_back(difference * scale * grad.at(shapes.out, flat));
    }
    expect_close(call.out.values(), expected, epsilon(dtype), "out");
}

const Case mse_loss_backward{"numerics/mse_loss_backward", [] {
                                 for (const auto& shapes : kShapes) {
                                     for (const auto dtype : kFloatTypes) {
                                         for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                                             expect_backward(shapes, dtype, reduction, false);
                                             expect_backward(shapes, dtype, reduction, true);
                                         }
                                     }
                                 }
                             }};

const Case one_rounding{"numerics/mse_loss_backward_rounds_once", [] {
                            // Rounded after each step, the difference and the result would be one unit larger.
                            constexpr double difference = 1.00146484375;
                            MseLossBackward call;
                            call.grad = {ACL_FLOAT16, {1}, {1.5}};
                            call.self = {ACL_FLOAT16, {1}, {1.0009765625}};
                            call.target = {ACL_FLOAT16, {1}, {1.0009765625 - difference}};
                            call.out = {ACL_FLOAT16, {1}};
                            call.reduction = 0;
                            run(call);
                            expect_close(call.out.values(), {3.00390625}, 0, "out");
                            // A float32 out has the kernel's 16 bits.
                            call.out = floats({1});
                            run(call);
                            expect_close(call.out.values(), {3.00390625}, 0, "float32 out");
                        }};

const Case strided_out{"numerics/mse_loss_backward_into_a_view", [] {
                           MseLossBackward call;
                           call.out = {
                               ACL_FLOAT, {2, 2}, {7}, {.strides = Shape{1, 3}, .offset = 1, .storage = Shape{8}}};
                           run(call);
                           expect_close(call.out.values(), {7, 0, 1, 7, 0, 3, 7, 7}, 0, "out's storage");
                       }};

const Case special_values{"numerics/mse_loss_backward_of_special_values", [] {
                              MseLossBackward call;
                              call.self.set({INFINITY, -INFINITY, NAN, 1e30});
                              call.grad.set({1, 1, 1, 1e30});
                              run(call);
                              expect_close(call.out.values(), {INFINITY, -INFINITY, NAN, INFINITY}, 0, "out");
                          }};

const Case mse_loss{
    "numerics/mse_loss", [] {
        for (const auto& shapes : kShapes) {
            for (const auto dtype : kFloatTypes) {
                const auto self = random(dtype, shapes.self, -3, 3, 4);
                const auto target = random(dtype, shapes.target, -3, 3, 5);
                std::vector<double> squares;
                // self and target broadcast to out without the gradient in these shapes.
                for (std::int64_t flat = 0; flat < numel(shapes.out); ++flat) {
                    squares.push_back(std::pow(self.at(shapes.out, flat) - target.at(shapes.out, flat), 2));
                }
                double sum = 0;
                for (const double square : squares) sum += square;
                MseLoss call;
                call.self = transposed(dtype, self);
                call.target = {dtype, target.shape, target.values};
                for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                    call.reduction = reduction;
                    call.out = {dtype, reduction == 0 ? shapes.out : Shape{}};
                    run(call);
                    const double mean = sum / static_cast<double>(squares.size());
                    const auto expected = reduction == 0   ? squares
                                          : reduction == 1 ? std::vector<double>{mean}
                                                           : std::vector<double>{sum};
                    expect_close(call.out.values(), expected, 2 * epsilon(dtype), "out");
                }
            }
        }
    }};

double bce_gradient(double g, double x, double y, double w) { return (x - y) / std::max(x * (1 - x), 1e-12) * w * g; }

void expect_bce_backward(aclDataType dtype, std::int64_t reduction, bool weighted, const Shape& of_grad) {
    const Shape shape{6, 210};
    const auto grad = random(dtype, of_grad, -2, 2, 1), self = random(dtype, shape, 0.02, 0.98, 2);
    const auto target = random(dtype, shape, 0, 1, 3), weight = random(dtype, {210}, 0, 2, 4);
    BinaryCrossEntropyBackward call;
    call.grad = {dtype, of_grad, grad.values};
    call.self = transposed(dtype, self);
    call.target = {dtype, shape, target.values};
    call.weight = weighted ? Tensor(dtype, {210}, weight.values) : Tensor();
    call.out = {dtype, shape};
    call.reduction = reduction;
    run(call);
    std::vector<double> expected;
    for (std::int64_t flat = 0; flat < numel(shape); ++flat) {
        const double value = bce_gradient(grad.at(shape, flat), self.at(shape, flat), target.at(shape, flat),
                                          weighted ? weight.at(shape, flat) : 1);
        expected.push_back(reduction == 1 ? value / static_cast<double>(numel(shape)) : value);
    }
    expect_close(call.out.values(), expected, 2 * epsilon(dtype), "out");
}

const Case bce_backward{"numerics/binary_cross_entropy_backward",
                        [] {
                            for (const auto dtype : kFloatTypes) {
                                for (std::int64_t reduction = 0; reduction < 3; ++reduction) {
                                    expect_bce_backward(dtype, reduction, true, {6, 210});
                                    expect_bce_backward(dtype, reduction, false, {});
                                }
                            }
                        },
                        {"Ascend910B", "Ascend950"}};

const Case bce_at_the_edges{"numerics/binary_cross_entropy_backward_at_the_edges", [] {
                                // The denominator is bounded, x is not.
                                BinaryCrossEntropyBackward call;
                                call.grad.set({1, 1, 1, 1});
                                call.self.set({0, 1, 2, NAN});
                                run(call);
                                expect_close(call.out.values(), {-0.5e12, 0.5e12, 1.5e12, NAN}, 1e-6, "out");
                            }};

const Case bce{
    "numerics/binary_cross_entropy", [] {
        for (const auto dtype : kFloatTypes) {
            const Shape shape{3, 700};
            auto self = random(dtype, shape, 0.01, 0.99, 1);
            self.values[0] = 0;
            self.values[1] = 1;
            const auto target = random(dtype, shape, 0, 1, 2), weight = random(dtype, shape, 0, 2, 3);
            std::vector<double> losses;
            double sum = 0;
            for (std::size_t index = 0; index < self.values.size(); ++index) {
                const double x = self.values[index], y = target.values[index];
                const double log_x = std::max(std::log(x), -100.0), log_rest = std::max(std::log1p(-x), -100.0);
                losses.push_back(-(y * log_x + (1 - y) * log_rest) * weight.values[index]);
                sum += losses.back();
            }
            BinaryCrossEntropy call;
            call.self = {dtype, shape, self.values};
            call.target = {dtype, shape, target.values};
            call.weight = {dtype, shape, weight.values};
            call.out = {dtype, shape};
            run(call);
            expect_close(call.out.values(), losses, 2 * epsilon(dtype), "out");
            call.out = {dtype, {}};
            call.reduction = 1;
            run(call);
            expect_close(call.out.values(), {sum / static_cast<double>(losses.size())}, 2 * epsilon(dtype), "mean");
        }
    }};

}  // namespace
