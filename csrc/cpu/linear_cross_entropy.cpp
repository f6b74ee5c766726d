// Logits in float32 of an input and a head in float32 or bfloat16, at the speed that a CPU has for them.
//
// torch's own product of bfloat16 matrices rounds to bfloat16, which costs a loss three digits; its product of float32
// ones is MKL's, which runs at less than half the speed of an AMD chip with AVX-512. In between is the kernel that
// torch computes attention with: brgemm of oneDNN, one tile of a product, with sums in float32. This file cuts a
// product into such tiles.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace torch_aclnn_ops {
namespace {

// A panel of classes is packed once and stays in the second-level cache, while the rows pass by.
constexpr int64_t kClasses = 128;
constexpr int64_t kRows = 256;
constexpr int64_t kFeatures = 512;

// What is moved at once: numbers of 16 bits in pairs of successive features, as the instructions for them want it.
using Unit = float;

// Packs the transpose of some rows of the head: a unit of each class, then the next unit of each class.
template <class Number>
void pack(const Number* const weight, const int64_t stride, const int64_t classes, const int64_t features,
          std::vector<Unit>& panel) {
    constexpr int64_t kNumbers = sizeof(Unit) / sizeof(Number);
    constexpr int64_t kBlock = 16;  // rows that are read side by side
    for (int64_t row = 0; row < classes; row += kBlock) {
        at::vec::transpose_mxn<Unit>(reinterpret_cast<const Unit*>(weight + row * stride), stride / kNumbers,
                                     panel.data() + row, classes, static_cast<int>(std::min(kBlock, classes - row)),
                                     static_cast<int>(features / kNumbers));
    }
}

// Multiplies all rows of the input with a packed panel of the head.
template <class Number>
void multiply(const Number* const input, const int64_t input_stride, const std::vector<Unit>& panel, const int64_t rows,
              const int64_t classes, const int64_t features, float* const out, const int64_t out_stride) {
    const auto* const packed = reinterpret_cast<const Number*>(panel.data());
    for (int64_t row = 0; row < rows; row += kRows) {
        for (int64_t feature = 0; feature < features; feature += kFeatures) {
            const bool adds = feature > 0;
            at::native::cpublas::brgemm(std::min(kRows, rows - row), classes, std::min(kFeatures, features - feature),
                                        input_stride, classes, out_stride, adds, input + row * input_stride + feature,
                                        packed + feature * classes, out + row * out_stride,
                                        /*is_vnni=*/sizeof(Number) < sizeof(Unit));
        }
    }
}

template <class Number>
void write_logits(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& out) {
    const int64_t rows = input.size(0), classes = weight.size(0), features = weight.size(1);
    const auto* const from = input.const_data_ptr<Number>();
    const auto* const head = weight.const_data_ptr<Number>();
    auto* const to = out.data_ptr<float>();
    at::parallel_for(0, (classes + kClasses - 1) / kClasses, 1, [&](const int64_t begin, const int64_t end) {
        std::vector<Unit> panel((kClasses * features * sizeof(Number)) / sizeof(Unit));
        for (int64_t first = begin * kClasses; first < std::min(end * kClasses, classes); first += kClasses) {
            const int64_t number = std::min(kClasses, classes - first);
            pack(head + first * weight.stride(0), weight.stride(0), number, features, panel);
            multiply(from, input.stride(0), panel, rows, number, features, to + first, out.stride(0));
        }
        at::native::cpublas::brgemm_release(/*is_vnni=*/sizeof(Number) < sizeof(Unit));
    });
}

void check(const at::Tensor& tensor, const char* const name, const at::ScalarType dtype, const int64_t rows,
           const int64_t columns) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.dim() == 2 && tensor.size(0) == rows &&
                          tensor.size(1) == columns && (columns < 2 || tensor.stride(1) == 1),
                      "linear_cross_entropy_logits: ", name, " must have dtype ", dtype, ", shape (", rows, ", ",
                      columns, ") and contiguous rows, but it has dtype ", tensor.scalar_type(), ", shape ",
                      tensor.sizes(), " and strides ", tensor.strides());
}

void check_all(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& out) {
    const at::ScalarType dtype = weight.scalar_type();
    TORCH_CHECK_VALUE(dtype == at::kBFloat16 || dtype == at::kFloat,
                      "linear_cross_entropy_logits: weight must have dtype BFloat16 or Float, but it has ", dtype);
    const int64_t unit = dtype == at::kBFloat16 ? 2 : 1;
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) > 0 && weight.size(1) % unit == 0 &&
                          (weight.size(0) < 2 || weight.stride(0) % unit == 0),
                      "linear_cross_entropy_logits: weight must have two dimensions and, in bfloat16, an even number "
                      "of features and an even distance between rows, but it has shape ",
                      weight.sizes(), " and strides ", weight.strides());
    check(weight, "weight", dtype, weight.size(0), weight.size(1));
    check(input, "input", dtype, input.dim() == 0 ? 0 : input.size(0), weight.size(1));
    check(out, "out", at::kFloat, input.size(0), weight.size(0));
}

// Writes input @ weight.T to out.
void logits(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& out) {
    check_all(input, weight, out);
    if (weight.scalar_type() == at::kFloat) {
        write_logits<float>(input, weight, out);
    } else {
        write_logits<at::BFloat16>(input, weight, out);
    }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_aclnn_ops, library) {
    library.def("linear_cross_entropy_logits(Tensor input, Tensor weight, Tensor(a!) out) -> ()");
    library.impl("linear_cross_entropy_logits", c10::DispatchKey::CPU, TORCH_FN(logits));
    library.impl("linear_cross_entropy_logits", c10::DispatchKey::Meta, TORCH_FN(check_all));
}

}  // namespace torch_aclnn_ops
