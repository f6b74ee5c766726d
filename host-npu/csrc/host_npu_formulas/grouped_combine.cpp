// Grouped products of int8 rows, whose result rows are summed by token.
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

struct Combined {
    IntegerTensor x, weight;
    Tensor scale;
    Without<"bias"> bias;
    Without<"offset"> offset;
    Without<"antiquantScale"> antiquant_scale;
    Without<"antiquantOffset"> antiquant_offset;
    OptionalTensor token_scale;
    IntegerTensor list;
    OptionalTensor shared;
    Tensor logit;
    IntegerTensor rows;
    std::int64_t dtype;
    float shared_weight;
    std::int64_t shared_offset;
    bool transpose_x, transpose_weight;
    std::int64_t list_type;
    std::vector<std::int64_t> tuning;
    Out out;
};

// Adds each row times its logit to its token, and the rows of `shared` times their weight to tokens from an offset.
void grouped_combine(const Combined& call) {
    TORCH_CHECK(!call.transpose_x && !call.transpose_weight, "transposeX1 and transposeX2 must be false");
    TORCH_CHECK(call.dtype == 0, "dtype is ", call.dtype, "; CANN takes 0, float32");
    TORCH_CHECK(call.list_type == 0 || call.list_type == 1, "groupListType is ", call.list_type, " instead of 0 or 1");
    const auto tokens = call.out.sizes()[0];
    TORCH_CHECK(!call.shared || (call.shared_offset >= 0 && call.shared_offset + call.shared->size(0) <= tokens),
                "sharedInput has ", call.shared ? call.shared->size(0) : 0, " rows from ", call.shared_offset,
                " on of ", tokens);
    require_indices("rowIndex", call.rows, tokens);
    const auto sums = at::zeros(call.out.sizes(), call.scale.options());
    if (call.shared) {
        sums.slice(0, call.shared_offset, call.shared_offset + call.shared->size(0))
            .add_(*call.shared, call.shared_weight);
    }
    std::int64_t first = 0;
    for (std::int64_t group = 0; group < call.list.size(0) && !call.list.is_meta(); ++group) {
        const auto number = call.list[group].item<std::int64_t>(), last = call.list_type == 1 ? first + number : number;
        TORCH_CHECK(first <= last && last <= call.x.size(0), "the group ", group, " has the rows from ", first, " to ",
                    last, " of ", call.x.size(0));
        const auto of_group = [&](const Tensor& tensor) { return tensor.slice(0, first, last); };
        auto y = of_group(call.x).to(at::kDouble).matmul(call.weight[group].to(at::kDouble)).to(at::kFloat);
        y = y * call.scale[group];
        if (call.token_scale) y = y * of_group(*call.token_scale).unsqueeze(-1);
        sums.index_add_(0, of_group(call.rows).to(at::kLong), y * of_group(call.logit).unsqueeze(-1));
        first = last;
    }
    call.out = sums;
}
constexpr Members<&Combined::x, &Combined::weight, &Combined::scale, &Combined::bias, &Combined::offset,
                  &Combined::antiquant_scale, &Combined::antiquant_offset, &Combined::token_scale, &Combined::list,
                  &Combined::shared, &Combined::logit, &Combined::rows>
    kCombinedTensors;
constexpr Members<&Combined::dtype, &Combined::shared_weight, &Combined::shared_offset, &Combined::transpose_x,
                  &Combined::transpose_weight, &Combined::list_type, &Combined::tuning, &Combined::out>
    kCombinedSettings;
const Formula<"aclnnGroupedMatmulFinalizeRoutingWeightNzV2",
              collected<grouped_combine, kCombinedTensors, kCombinedSettings>>
    combined_products{
        {"x1", {ACL_INT8}, "M K"},       {"x2", {ACL_INT8}, "E<=256 K N"},
        {"scale", kFloat, "E N"},        {"pertokenScaleOptional", kFloat, "M"},
        {"groupList", {ACL_INT64}, "E"}, {"sharedInput", {ACL_BF16}, "* N"},
        {"logit", kFloat, "M"},          {"rowIndex", kIndices, "M"},
        {"out", kFloat, "* N"},
};

}  // namespace
}  // namespace host_npu
