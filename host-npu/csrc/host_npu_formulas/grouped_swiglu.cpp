// Products of groups of int8 rows with a matrix each, whose gated units are quantized.
#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>

#include "host_npu_formulas/halves.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

// The rows after the last group are left as they are, as CANN leaves them.
void grouped_swiglu(const IntegerTensor& x, const Tensor& matrices, const Tensor& scale, const Tensor& token_scale,
                    const IntegerTensor& list, bool lists_sizes, const Out& y, const Out& y_scale) {
    require_shapes({{"x", x.sizes(), "M K<=65535"},
                    {"weight", matrices.sizes(), "E K N<=10240"},
                    {"weightScale", scale.sizes(), "E N"},
                    {"xScale", token_scale.sizes(), "M"},
                    {"groupList", list.sizes(), "E"},
                    {"output", y.sizes(), "M *"},
                    {"outputScale", y_scale.sizes(), "M"}});
    TORCH_CHECK(y.sizes()[1] * 2 == scale.size(1), "output has ", y.sizes()[1], " columns instead of half of the ",
                scale.size(1), " of weight");
    if (list.is_meta()) return;
    std::int64_t first = 0;
    for (std::int64_t group = 0; group < list.size(0); ++group) {
        const auto number = list[group].item<std::int64_t>(), last = lists_sizes ? first + number : number;
        TORCH_CHECK(first <= last && last <= x.size(0), "the group ", group, " has the rows from ", first, " to ", last,
                    " of ", x.size(0));
        const auto sums = x.slice(0, first, last).to(at::kDouble).matmul(matrices[group].to(at::kDouble));
        const auto wide = sums * scale[group] * token_scale.slice(0, first, last).unsqueeze(-1);
        const auto [gate, up] = halves(wide.to(at::kFloat), -1);
        const auto [quantized, of_row] = quantized_rows(at::silu(gate) * up);
        y.in_place().slice(0, first, last).copy_(quantized);
        y_scale.in_place().slice(0, first, last).copy_(of_row);
        first = last;
    }
}

void grouped_swiglu_quant(const IntegerTensor& x, const IntegerTensor& weight, Without<"bias">, Without<"offset">,
                          const Tensor& scale, const Tensor& token_scale, const IntegerTensor& ends, const Out& y,
                          const Out& y_scale, const OptionalOut&) {
    grouped_swiglu(x, weight, scale, token_scale, ends, false, y, y_scale);
}
const Formula<"aclnnGroupedMatmulSwigluQuantWeightNZ", grouped_swiglu_quant> grouped_units_to_int8{
    {"x", {ACL_INT8}, "M K"},        {"weight", {ACL_INT8}, "E K N"},
    {"weightScale", kFloats, "E N"}, {"xScale", kFloat, "M"},
    {"groupList", {ACL_INT64}, "E"}, {"output", {ACL_INT8}, "M *"},
    {"outputScale", kFloat, "M"},    {"outputOffset"},
};

void grouped_swiglu_quant_v2(const IntegerTensor& x, const std::vector<AnyTensor>& weight,
                             const std::vector<Tensor>& scale, const std::vector<AnyTensor>& assist, Without<"bias">,
                             const Tensor& token_scale, Without<"smoothScale">, const IntegerTensor& list,
                             std::int64_t dequant_mode, std::int64_t, std::int64_t quant_mode, std::int64_t list_type,
                             const std::vector<std::int64_t>&, const Out& y, const Out& y_scale) {
    TORCH_CHECK(weight.size() == 1 && scale.size() == 1 && assist.empty(),
                "the host NPU has one weight and one weightScale of all groups, and no weightAssistMatrix, not ",
                weight.size(), ", ", scale.size(), " and ", assist.size());
    TORCH_CHECK(dequant_mode == 0 && quant_mode == 0, "the host NPU has dequantMode and quantMode 0 only, not ",
                dequant_mode, " and ", quant_mode);
    TORCH_CHECK(list_type == 0 || list_type == 1, "groupListType is ", list_type, " instead of 0 or 1");
    grouped_swiglu(x, weight[0], scale[0], token_scale, list, list_type == 1, y, y_scale);
}
const Formula<"aclnnGroupedMatmulSwigluQuantWeightNzV2", grouped_swiglu_quant_v2> grouped_units_to_int8_v2{
    {"x", {ACL_INT8}, "M K"},      {"weight", {ACL_INT8}},       {"weightScale", kFloats},
    {"weightAssistMatrix"},        {"xScale", kFloat, "M"},      {"groupList", {ACL_INT64}, "E"},
    {"output", {ACL_INT8}, "M *"}, {"outputScale", kFloat, "M"},
};

}  // namespace
}  // namespace host_npu
