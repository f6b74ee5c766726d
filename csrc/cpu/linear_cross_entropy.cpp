// The CPU operator of the linear cross entropy: float32 logits from bfloat16 matrices.
//
// torch's bfloat16 matrix product rounds to bfloat16, which loses three digits of the loss. oneDNN's brgemm, which
// torch uses for attention, computes one tile with float32 accumulation and native bfloat16 instructions. This file
// splits a product into such tiles.

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace torch_aclnn_ops {
namespace {

// Two adjacent features, as the bfloat16 instructions require.
using Pair = std::array<at::BFloat16, 2>;

// A panel of classes is packed once and stays in the L2 cache while all rows are multiplied by it.
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

// Transposes a 4 x 4 matrix.
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

// Packs the transpose of some rows of the head: a pair of features of each class, then the next pair of each class.
void pack(const at::BFloat16* const weight, const int64_t stride, const int64_t classes, const int64_t features,
          std::vector<Pair>& panel) {
    constexpr int64_t kTile = 4, kBlock = 16;  // rows that are read together
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

// Multiplies all rows of the input by a packed panel of the head.
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_aclnn_ops, library) {
    library.def("linear_cross_entropy_logits(Tensor input, Tensor weight, Tensor(a!) out) -> ()");
    library.impl("linear_cross_entropy_logits", c10::DispatchKey::CPU, TORCH_FN(logits));
    library.impl("linear_cross_entropy_logits", c10::DispatchKey::Meta, TORCH_FN(check_products));
}

}  // namespace torch_aclnn_ops
