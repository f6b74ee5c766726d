// aclnnEmbedding and aclnnEmbeddingDenseBackward.
#include <cstring>
#include <stdexcept>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/native_kernels.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

const NativeKernels native{"aten::embedding", "aten::embedding_dense_backward"};

// On the device, such an index accesses memory outside the tensor, usually without an error.
[[noreturn]] void fault(std::int64_t index, std::int64_t rows) {
    throw std::out_of_range("index " + std::to_string(index) + " is outside the " + std::to_string(rows) +
                            " rows of the embedding");
}

// Calls `copy(row of out, data of the row of weight)` for every index.
template <class Copy>
void for_each_row(const HostTensor& weight, const HostTensor& indices, const Copy& copy) {
    const auto rows = weight->shape[0];
    const auto pitch = weight->strides[0] * static_cast<std::int64_t>(item_size(weight->dtype));
    const auto ids = read_all<std::int64_t>(indices);
    for (std::size_t row = 0; row < ids.size(); ++row) {
        if (ids[row] < 0 || ids[row] >= rows) fault(ids[row], rows);
        copy(row, weight.data + ids[row] * pitch);
    }
}

void gather(const HostTensor& weight, const HostTensor& indices, const HostTensor& out) {
    Layout row = *weight.layout;
    row.shape = Dims(std::span(weight->shape.begin() + 1, weight->shape.end()));
    row.strides = Dims(std::span(weight->strides.begin() + 1, weight->strides.end()));
    const auto length = row.numel();
    const auto bytes = length * static_cast<std::int64_t>(item_size(row.dtype));
    if (row.contiguous() && out->contiguous()) {
        for_each_row(weight, indices, [&](std::size_t to, const std::byte* from) {
            std::memcpy(out.data + static_cast<std::int64_t>(to) * bytes, from, static_cast<std::size_t>(bytes));
        });
        return;
    }
    Elements result(out);
    visit(row.dtype, [&]<class Value>(Value) {
        const auto values = std::make_unique<Value[]>(static_cast<std::size_t>(length));
        for_each_row(weight, indices, [&](std::size_t, std::byte* from) {
            Elements(HostTensor{&row, from}).read_stored<Value>(values.get(), length);
            result.write_stored<Value>(values.get(), length);
        });
    });
}

Plan plan_forward(const Named& weight, const Named& indices, const Named& out) {
    require_present({weight, indices, out});
    constexpr DtypeSet everywhere{ACL_DOUBLE, ACL_FLOAT, ACL_FLOAT16, ACL_INT64,     ACL_INT32,     ACL_INT16,
                                  ACL_INT8,   ACL_UINT8, ACL_BOOL,    ACL_COMPLEX64, ACL_COMPLEX128};
    require_dtype(weight, has_bfloat16() ? everywhere | DtypeSet{ACL_BF16} : everywhere);
    require_same_dtype(out, weight);
    require_dtype(indices, {ACL_INT32, ACL_INT64});
    require_rank_at_most_8({weight, indices, out});
    require_rank(out, indices->shape.rank() + 1);
    auto leading = indices->shape;
    leading.push_back(out->shape.back());
    require_shape(out, leading);
    if (weight->empty() || indices->empty()) return {};

    require_copyable({weight, indices});
    // Weight's rank and row length are unchecked: the copy to out refuses mismatches. CANN would read beyond a scalar.
    require(weight->shape.rank() > 0, kInnerNullPointer, "weight has no dimensions");
    auto gathered = indices->shape;
    for (std::size_t index = 1; index < weight->shape.rank(); ++index) gathered.push_back(weight->shape[index]);
    require_view_copy({gathered, weight->dtype}, out);
    Intermediates intermediates;
    for (const auto& argument : {weight, indices, out}) intermediates.argument(argument.layout(), argument->dtype);
    // 64-bit floating point is gathered on an AI CPU.
    const bool on_ai_core = !DtypeSet{ACL_DOUBLE, ACL_COMPLEX64, ACL_COMPLEX128}.contains(weight->dtype);
    return {.workspace_size = intermediates.kernel().total(),
            .kernel = [](const KernelArguments& arguments) { gather(arguments[0], arguments[1], arguments[2]); },
            .repeatable = on_ai_core};
}

struct Backward {
    std::int64_t num_weights;
    std::int64_t padding_idx;
    bool scale_grad_by_freq;
    // Whether the AscendC kernel for narrow rows is used. It does not sort the indices and is not deterministic.
    bool small_dim;
    // Whether each gradient is scaled before it is added, as in the TBE kernel; the later kernel scales the sum.
    bool scales_first;
    aclDataType kernel_dtype;

    // Whether the chip's kernel skips an index outside the rows.
    bool skips_outside() const { return soc() == Soc::Ascend950 || (soc() == Soc::Ascend910 && scale_grad_by_freq); }

    // The row of an index, or -1 to skip it.
    std::int64_t row(std::int64_t index) const {
        // A2 and A3 truncate indices to 32 bits without a check.
        if (is_a2_or_a3()) index = static_cast<std::int32_t>(index);
        if (index >= 0 && index < num_weights) return index == padding_idx ? -1 : index;
        if (!skips_outside() && !(small_dim && index == padding_idx)) fault(index, num_weights);
        return -1;
    }

    void operator()(const KernelArguments& arguments) const {
        const auto &grad = arguments[0], &out = arguments[2];
        auto rows = read_all<std::int64_t>(arguments[1]);
        for (auto& index : rows) index = row(index);
        std::vector<float> counts(scale_grad_by_freq ? static_cast<std::size_t>(num_weights) : 0);
        if (scale_grad_by_freq) {
            for (const auto index : rows) {
                if (index >= 0) counts[static_cast<std::size_t>(index)] += 1.0f;
            }
        }
        const auto dim = out->shape[1];
        std::vector<float> sums(static_cast<std::size_t>(num_weights * dim));
        std::vector<float> gradient(static_cast<std::size_t>(dim));
        Elements gradients(grad);
        for (const auto index : rows) {
            gradients.read(gradient.data(), dim);
            if (index < 0) continue;
            const float scale =
                scale_grad_by_freq && scales_first ? 1.0f / counts[static_cast<std::size_t>(index)] : 1.0f;
            float* const sum = &sums[static_cast<std::size_t>(index * dim)];
            for (std::int64_t column = 0; column < dim; ++column)
                sum[column] += gradient[static_cast<std::size_t>(column)] * scale;
        }
        if (scale_grad_by_freq && !scales_first) scale_rows(sums, counts, dim);
        if (out->dtype != kernel_dtype) round_to(kernel_dtype, sums.data(), num_weights * dim);
        write_all(out, sums);
    }

    static void scale_rows(std::vector<float>& sums, const std::vector<float>& counts, std::int64_t dim) {
        auto sum = sums.begin();
        for (const auto count : counts) {
            const float scale = 1.0f / (count == 0.0f ? 1.0f : count);
            for (std::int64_t column = 0; column < dim; ++column) *sum++ *= scale;
        }
    }
};

// The kernel of the Ascend910 keeps the counts in its unified buffer, next to a row.
void require_counts_fit_910(std::int64_t num_weights, std::int64_t dim, aclDataType indices) {
    const auto counts = num_weights / cube_cores() + num_weights % cube_cores();
    const auto limit = indices == ACL_INT64 ? (180192 - counts * 8) / 20 : (180192 - counts * 4) / 36;
    require(dim < limit, kInnerNullPointer, "rows of ", dim, " elements and the counts of ", num_weights,
            " rows do not fit the unified buffer");
}

// The size of the gradient and the result, in bytes, up to which a 16-bit gradient is first widened.
constexpr std::int64_t kWidenBelow = 100 * 1024 * 1024;

Plan plan_backward(const Named& grad, const Named& indices, std::uint64_t num_weights, std::uint64_t padding_idx,
                   bool scale_grad_by_freq, const Named& out) {
    require_present({grad, indices, out});
    require_dtype(grad, float_dtypes());
    require_dtype(indices,
                  {ACL_FLOAT16, ACL_FLOAT, ACL_DOUBLE, ACL_INT8, ACL_UINT8, ACL_INT16, ACL_INT32, ACL_INT64, ACL_BOOL});
    require_dtype(out, float_dtypes());
    require_rank_at_most_8({grad, indices, out});
    const auto rank = grad->shape.rank();
    // For a scalar, CANN reads beyond the shape.
    require(rank > 0, kInnerNullPointer, "grad has no dimensions");
    const auto dim = grad->shape.back();
    const auto rows = Dims(std::span(grad->shape.begin(), rank - 1)).numel();
    require(dim == 0 || rows == indices->numel(), kParamInvalid, "grad has ", rows, " rows, indices has ",
            indices->numel(), " elements");
    require_shape(out, {static_cast<std::int64_t>(num_weights), dim});
    for (const auto& argument : {grad, indices, out}) require_public_format(argument);
    Intermediates intermediates;
    if (grad->empty() || indices->empty()) {
        require_copyable({out});
        if (is_copied(out.layout())) intermediates.tensor(out->shape, out->dtype);
        return {.workspace_size = intermediates.total(),
                .kernel = [](const KernelArguments& arguments) { fill(arguments[2], 0.0f); }};
    }
    require_copyable({grad, indices});
    // The tiling divides the rows among at most as many cores as there are rows to scale.
    require(!(is_a2_or_a3() && scale_grad_by_freq && num_weights == 0), kInnerNullPointer,
            "the tiling failed: there are no rows to scale");
    require(!(soc() == Soc::Ascend950 && indices->shape.rank() == 0 && dim > 2048 &&
              static_cast<std::int64_t>(num_weights) > 5 * dim),
            kInnerNullPointer, "the tiling failed: indices has no dimensions, and the rows ", dim, " elements");
    require(soc() != Soc::Ascend310P, kInnerNullPointer, "no kernel of this chip calculates it");
    if (soc() == Soc::Ascend910 && scale_grad_by_freq) {
        require_counts_fit_910(static_cast<std::int64_t>(num_weights), dim, indices->dtype);
    }

    constexpr std::uint64_t kInt32Max = 0x7FFFFFFF;
    const auto elements = grad->numel() + out->numel();
    const bool widened = !is_a2_or_a3() || elements * 2 < kWidenBelow || rows < 512 || scale_grad_by_freq;
    const Backward kernel{.num_weights = static_cast<std::int64_t>(num_weights),
                          .padding_idx = static_cast<std::int64_t>(padding_idx),
                          .scale_grad_by_freq = scale_grad_by_freq,
                          .small_dim = is_a2_or_a3() && deterministic_level() == 0 && dim <= 512 &&
                                       num_weights <= (std::uint64_t{1} << 24),
                          .scales_first = soc() == Soc::Ascend910 || num_weights > kInt32Max ||
                                          static_cast<std::uint64_t>(rows) > kInt32Max,
                          .kernel_dtype = widened ? ACL_FLOAT : grad->dtype};
    intermediates.argument(grad.layout(), kernel.kernel_dtype)
        .argument(indices.layout(), ACL_INT32)
        .argument(out.layout(), kernel.kernel_dtype)
        .bytes(scale_grad_by_freq ? 4 * ((kernel.num_weights + 7) / 8 * 8) : 0);
    // The sorted indices and their original positions.
    if (!kernel.small_dim && rows > 1) intermediates.bytes(4 * rows).bytes(4 * rows);
    if (kernel.kernel_dtype != ACL_FLOAT) intermediates.tensor(out->shape, ACL_FLOAT);
    return {.workspace_size = intermediates.kernel().total(), .kernel = kernel};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnEmbedding, kForward)
HOST_NPU_PHASE_ONE aclnnEmbeddingGetWorkspaceSize(const aclTensor* weight, const aclTensor* indices,
                                                  const aclTensor* out, std::uint64_t* workspaceSize,
                                                  aclOpExecutor** executor) {
    return PhaseOne(kForward, workspaceSize, executor).with(weight, indices, out).run([&] {
        return plan_forward({"weight", weight}, {"indices", indices}, {"out", out});
    });
}

HOST_NPU_PHASE_TWO(aclnnEmbeddingDenseBackward, kBackward)
HOST_NPU_PHASE_ONE aclnnEmbeddingDenseBackwardGetWorkspaceSize(const aclTensor* grad, const aclTensor* indices,
                                                               std::uint64_t numWeights, std::uint64_t paddingIdx,
                                                               bool scaleGradByFreq, const aclTensor* out,
                                                               std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kBackward, workspaceSize, executor)
        .with(grad, indices, out, numWeights, paddingIdx, scaleGradByFreq)
        .run([&] {
            return plan_backward({"grad", grad}, {"indices", indices}, numWeights, paddingIdx, scaleGradByFreq,
                                 {"out", out});
        });
}
