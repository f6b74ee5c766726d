// The embedding and the copy against what they should be.
#include "tests/calls.h"
#include "tests/reference.h"

namespace {

using namespace test;

struct Gradients {
    aclDataType dtype;
    std::int64_t rows, dim, num_weights;
    std::uint64_t padding_idx;
    bool scale;
};

void expect_backward(const Gradients& problem) {
    const auto gradients = random_values(problem.dtype, problem.rows * problem.dim, -1, 1, 1);
    std::vector<double> indices;
    std::mt19937 generator(2);
    for (std::int64_t row = 0; row < problem.rows; ++row) {
        indices.push_back(static_cast<double>(generator() % static_cast<unsigned>(problem.num_weights)));
    }
    EmbeddingDenseBackward call;
    call.grad = {problem.dtype, {problem.rows, problem.dim}, gradients};
    call.indices = {ACL_INT64, {problem.rows}, indices};
    call.out = {problem.dtype, {problem.num_weights, problem.dim}, {9}};
    call.num_weights = static_cast<std::uint64_t>(problem.num_weights);
    call.padding_idx = problem.padding_idx;
    call.scale = problem.scale;
    run(call);

    std::vector<double> counts(call.num_weights), expected(call.num_weights * static_cast<std::uint64_t>(problem.dim));
    for (const double index : indices) counts[static_cast<std::size_t>(index)] += 1;
    for (std::size_t row = 0; row < indices.size(); ++row) {
        const auto index = static_cast<std::size_t>(indices[row]);
        if (index == problem.padding_idx) continue;
        for (std::size_t column = 0; column < static_cast<std::size_t>(problem.dim); ++column) {
            const double gradient = gradients[row * static_cast<std::size_t>(problem.dim) + column];
            expected[index * static_cast<std::size_t>(problem.dim) + column] +=
                problem.scale ? gradient / counts[index] : gradient;
        }
    }
    expect_close(call.out.values(), expected, 4 * epsilon(problem.dtype), "out");
}

const Case backward{"numerics/embedding_dense_backward",
                    [] {
                        for (const auto dtype : {ACL_FLOAT, ACL_FLOAT16}) {
                            for (const bool scale : {false, true}) {
                                expect_backward({dtype, 400, 33, 17, 3, scale});
                                expect_backward({dtype, 1, 5, 2, static_cast<std::uint64_t>(-1), scale});
                                expect_backward({dtype, 50, 600, 7, 1000, scale});
                            }
                        }
                    },
                    {"Ascend910", "Ascend910B", "Ascend950"}};

// Many small gradients that would be lost if the sum itself had 16 bits.
const Case one_rounding{"numerics/embedding_dense_backward_accumulates_in_float32", [] {
                            constexpr std::int64_t rows = 4096;
                            EmbeddingDenseBackward call;
                            call.grad = {ACL_BF16, {rows, 1}, {1}};
                            call.indices = {ACL_INT32, {rows}, {2}};
                            call.out = {ACL_BF16, {4, 1}};
                            run(call);
                            expect_close(call.out.values(), {0, 0, 4096, 0}, 0, "out");
                        }};

const Case strided{
    "numerics/embedding_dense_backward_of_views", [] {
        EmbeddingDenseBackward call;
        call.grad = {
            ACL_FLOAT, {2, 3}, {0, 1, 4, 2, 5, 3, 6}, {.strides = Shape{1, 2}, .offset = 1, .storage = Shape{7}}};
        call.indices = {ACL_INT32, {2}, {1, 9, 2}, {.strides = Shape{2}, .storage = Shape{3}}};
        call.out = {ACL_FLOAT, {4, 3}, {9}, {.strides = Shape{1, 4}}};
        run(call);
        expect_close(call.out.values(), {0, 1, 4, 0, 0, 2, 5, 0, 0, 3, 6, 0}, 0, "out's storage");
    }};

const Case forward{"numerics/embedding_of_views", [] {
                       Embedding call;
                       // The transpose of {{1, 2, 3}, {4, 5, 6}}.
                       call.weight = {ACL_FLOAT, {3, 2}, counting(6), {.strides = Shape{1, 3}}};
                       call.indices = {ACL_INT32, {2, 2}, {2, 0, 1, 1}};
                       call.out = {ACL_FLOAT, {2, 2, 2}, {9}, {.offset = 1, .storage = Shape{9}}};
                       run(call);
                       expect_close(call.out.values(), {9, 3, 6, 1, 4, 2, 5, 2, 5}, 0, "out's storage");
                   }};

const Case copies{"numerics/inplace_copy", [] {
                      InplaceCopy call;
                      // Transposed.
                      call.src = {ACL_FLOAT, {2, 3}, counting(6), {.strides = Shape{1, 2}}};
                      run(call);
                      expect_close(call.self.values(), {1, 3, 5, 2, 4, 6}, 0, "a transpose");
                      // Broadcast, cast, into a view.
                      call.src = {ACL_INT32, {2, 1}, {-1, 7}};
                      call.self = {ACL_BF16, {2, 3}, {0}, {.strides = Shape{4, 1}, .offset = 1, .storage = Shape{8}}};
                      run(call);
                      expect_close(call.self.values(), {0, -1, -1, -1, 0, 7, 7, 7}, 0, "a cast into a view");
                      call.src = floats({4}, {-1.5, 0, 2.5, 1e10});
                      call.self = {ACL_INT64, {4}};
                      run(call);
                      expect_close(call.self.values(), {-1, 0, 2, 1e10}, 0, "integers");
                      call.self = {ACL_BOOL, {4}};
                      run(call);
                      expect_close(call.self.values(), {1, 0, 1, 1}, 0, "bool");
                  }};

const Case copy_refusals{
    "inplace_copy/refusals", [] {
        check_rows<InplaceCopy>({
            {"no selfRef", [](auto& call) { call.self = {}; }, 161001},
            {"no src", [](auto& call) { call.src = {}; }, 161001},
            {"src does not broadcast", [](auto& call) { call.src = floats({2}); }, 161002},
            {"src is larger", [](auto& call) { call.src = floats({2, 2, 3}); }, 161002},
            {"src of 9 dimensions", [](auto& call) { call.src = floats({1, 1, 1, 1, 1, 1, 1, 2, 3}); }, 161002},
            {"nothing to nothing",
             [](auto& call) {
                 call.self = floats({0});
                 call.src = floats({0});
             }},
        });
    }};

// All 16-bit numbers, and the values between and beside them.
const Case conversions{
    "numerics/16_bit_conversions", [] {
        std::vector<double> values;
        for (const double scale : {1e-9, 1e-7, 3e-5, 6e-5, 1.0, 6e4, 1e39}) {
            const auto some = random_values(ACL_FLOAT, 20000, -scale, scale, 3);
            values.insert(values.end(), some.begin(), some.end());
        }
        for (const double edge : {65504.0, 65519.99, 65520.0, 0x1p-24, 0x1p-25, 0x1.8p-25, 0x1p-14, 0.0, -0.0})
            values.insert(values.end(), {edge, -edge});
        for (auto& value : values) value = rounded(ACL_FLOAT, value);
        const auto count = static_cast<std::int64_t>(values.size());
        for (const auto dtype : {ACL_FLOAT16, ACL_BF16}) {
            InplaceCopy call;
            call.src = floats({count}, values);
            call.self = {dtype, {count}};
            run(call);
            std::vector<double> expected;
            for (const double value : values) expected.push_back(rounded(dtype, value));
            expect_close(call.self.values(), expected, 0, "rounded");

            std::vector<std::uint8_t> patterns;
            for (int bits = 0; bits < 65536; ++bits) {
                patterns.push_back(static_cast<std::uint8_t>(bits & 255));
                patterns.push_back(static_cast<std::uint8_t>(bits >> 8));
            }
            InplaceCopy widening;
            widening.src = {dtype, {65536}};
            widening.src.memory().upload(patterns);
            widening.self = floats({65536});
            run(widening);
            expect_close(widening.self.values(), decode(dtype, patterns), 0, "widened");
        }
    }};

}  // namespace
