// RotaryPositionEmbedding: pairs of elements of the last dimension are rotated.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// The pairs turned by 90 degrees: its transpose is its negative. They are the two halves (mode 0), or neighbours (1).
Tensor turned(const Tensor& x, std::int64_t mode) {
    TORCH_CHECK(mode == 0 || mode == 1, "the host NPU has modes 0 (half) and 1 (interleave) only, not ", mode);
    TORCH_CHECK(x.size(-1) % 2 == 0, "the last dimension has ", x.size(-1), " elements, which are no pairs");
    if (mode == 0) {
        const auto halves = x.chunk(2, -1);
        return at::cat({-halves[1], halves[0]}, -1);
    }
    const auto pairs = x.unflatten(-1, {-1, 2});
    return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

void rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, std::int64_t mode, const Out& out) {
    out = x * cos + turned(x, mode) * sin;
}
const Formula<"aclnnRotaryPositionEmbedding", rotary> rotary_forward;

// `rotate` is a matrix that turns the pairs in the mode's place.
void rotary_by(const Tensor& x, const Tensor& cos, const Tensor& sin, std::int64_t mode, const OptionalTensor& rotate,
               const Out& out) {
    out = x * cos + (rotate ? x.matmul(*rotate) : turned(x, mode)) * sin;
}
const Formula<"aclnnRotaryPositionEmbeddingV2", rotary_by> rotary_forward_by;

void rotary_grad(const Tensor& dy, const Tensor& cos, const Tensor& sin, const OptionalTensor& x, std::int64_t mode,
                 const Out& dx, const Out& dcos, const Out& dsin) {
    dx = dy * cos - turned(dy * sin, mode);
    if (!x) return;
    dcos = (dy * *x).sum_to_size(cos.sizes());
    dsin = (dy * turned(*x, mode)).sum_to_size(sin.sizes());
}
const Formula<"aclnnRotaryPositionEmbeddingGrad", rotary_grad> rotary_backward;

void rotate_both(const Out& query, const Out& key, const Tensor& cos, const Tensor& sin, std::int64_t,
                 const std::string& mode) {
    TORCH_CHECK(mode == "half" || mode == "interleave", "the host NPU has the modes half and interleave only, not ",
                mode);
    for (const auto* out : {&query, &key}) {
        const auto x = out->rounded();
        TORCH_CHECK(x.size(-1) == cos.size(-1), "cos has ", cos.size(-1), " elements of ", x.size(-1));
        *out = x * cos + turned(x, mode == "half" ? 0 : 1) * sin;
    }
}
const Formula<"aclnnApplyRotaryPosEmbV2", rotate_both> rotary_of_query_and_key;

// The neighbours come apart first: the results are halves.
void interleave_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Out& out) {
    rotary(x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2), cos, sin, 0, out);
}
const Formula<"aclnnInterleaveRope", interleave_rope> rotary_of_neighbours;

}  // namespace
}  // namespace host_npu
