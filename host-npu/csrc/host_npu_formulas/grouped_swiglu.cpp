// Grouped products of int8 rows, followed by gated units that are quantized.
#include <functional>

#include "ascendcl/device.h"
#include "host_npu_formulas/halves.h"
#include "host_npu_formulas/mx_quantization.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

// The gated units of the rows of all groups, each multiplied by its group's matrix. x and the matrices are float64.
Tensor grouped_units(const Tensor& x, const std::function<Tensor(std::int64_t)>& matrix, const IntegerTensor& list,
                     bool lists_sizes) {
    std::vector<Tensor> units;
    std::int64_t first = 0;
    for (std::int64_t group = 0; group < list.size(0); ++group) {
        const auto number = list[group].item<std::int64_t>(), last = lists_sizes ? first + number : number;
        TORCH_CHECK(first <= last && last <= x.size(0), "the group ", group, " has the rows from ", first, " to ", last,
                    " of ", x.size(0));
        const auto [gate, up] = halves(x.slice(0, first, last).matmul(matrix(group)).to(at::kFloat), -1);
        units.push_back(at::silu(gate) * up);
        first = last;
    }
    return at::cat(units);
}

// Size checks for both phases; the last shapes are those of the scales.
void require_sizes(const Tensor& x, const Tensor& matrices, const IntegerTensor& list, const Out& y,
                   std::vector<Shaped> scales) {
    scales.insert(scales.begin(), {{"x", x.sizes(), "M K<=65535"},
                                   {"weight", matrices.sizes(), "E K N<=10240"},
                                   {"groupList", list.sizes(), "E"},
                                   {"output", y.sizes(), "M *"}});
    require_shapes(scales);
    TORCH_CHECK(y.sizes()[1] * 2 == matrices.size(2), "output has ", y.sizes()[1], " columns instead of half of the ",
                matrices.size(2), " of weight");
}

// Selects the rows to write: CANN does not write the rows after the last group.
Out first_rows(const Out& out, const Tensor& rows) { return Out(out.in_place().slice(0, 0, rows.size(0))); }

void grouped_swiglu(const Tensor& x, const Tensor& matrices, const Tensor& scale, const Tensor& token_scale,
                    const IntegerTensor& list, bool lists_sizes, const Out& y, const Out& y_scale) {
    require_sizes(x, matrices, list, y,
                  {{"weightScale", scale.sizes(), "E N"},
                   {"xScale", token_scale.sizes(), "M"},
                   {"outputScale", y_scale.sizes(), "M"}});
    if (list.is_meta()) return;
    const auto matrix = [&](std::int64_t group) { return matrices[group].to(at::kDouble) * scale[group]; };
    const auto units = grouped_units(x.to(at::kDouble) * token_scale.unsqueeze(-1), matrix, list, lists_sizes);
    const auto [quantized, of_row] = quantized_rows(units);
    first_rows(y, units) = quantized;
    first_rows(y_scale, units) = of_row;
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

// The arguments of version 2.
struct GroupedSwiglu {
    AnyTensor x;
    std::vector<AnyTensor> weight, scale, assist;
    Without<"bias"> bias;
    AnyTensor token_scale;
    Without<"smoothScale"> smooth_scale;
    IntegerTensor list;
    std::int64_t dequant_mode, dequant_dtype, quant_mode, list_type;
    std::vector<std::int64_t> tuning;
    Out y, y_scale;
};

void of_tiles_v2(const GroupedSwiglu& call) {
    TORCH_CHECK(call.weight.size() == 1 && call.scale.size() == 1 && call.assist.empty(),
                "the host NPU has one weight and one weightScale of all groups, and no weightAssistMatrix, not ",
                call.weight.size(), ", ", call.scale.size(), " and ", call.assist.size());
    TORCH_CHECK(call.dequant_mode == 0 && call.quant_mode == 0,
                "the host NPU has dequantMode and quantMode 0 only, not ", call.dequant_mode, " and ", call.quant_mode);
    TORCH_CHECK(call.list_type == 0 || call.list_type == 1, "groupListType is ", call.list_type, " instead of 0 or 1");
    grouped_swiglu(call.x, call.weight[0], widened(call.scale[0]), widened(call.token_scale), call.list,
                   call.list_type == 1, call.y, call.y_scale);
}

// Weights in a base format, which only the Ascend950 supports, also in MX formats (dequantMode and quantMode 2).
void of_rows_v2(const GroupedSwiglu& call) {
    TORCH_CHECK(soc() == Soc::Ascend950, "weight has a base format; CANN takes FRACTAL_NZ on this chip");
    const bool is_mx = call.dequant_mode == 2 && call.quant_mode == 2;
    TORCH_CHECK((call.x.scalar_type() == at::kChar) != is_mx, "x has dtype ", name_of(call.x.scalar_type()),
                " with dequantMode ", call.dequant_mode, " and quantMode ", call.quant_mode,
                "; the host NPU has 2 with float8 in MX formats, and 0 with int8");
    const auto is_of_blocks = [](at::ScalarType scale) { return scale == at::kFloat8_e8m0fnu; };
    TORCH_CHECK(call.scale.size() == 1 && is_of_blocks(call.scale[0].scalar_type()) == is_mx &&
                    is_of_blocks(call.token_scale.scalar_type()) == is_mx &&
                    is_of_blocks(call.y_scale.dtype()) == is_mx && (call.y.dtype() == at::kChar) != is_mx,
                "the dtypes of weightScale, xScale, output and outputScale are not those of x in ",
                is_mx ? "blocks" : "int8");
    if (!is_mx) return of_tiles_v2(call);
    TORCH_CHECK(call.weight.size() == 1, "there are ", call.weight.size(), " weights instead of one of all groups");
    const auto& matrices = call.weight[0];
    require_sizes(call.x, matrices, call.list, call.y, {});
    TORCH_CHECK(matrices.size(2) % 128 == 0, "weight has ", matrices.size(2), " columns instead of a multiple of 128");
    const auto x = from_blocks(call.x, call.token_scale, -1).to(at::kDouble);
    if (call.list.is_meta()) {
        from_blocks(matrices, call.scale[0], 1);
        return to_blocks(widened(call.y.in_place()), call.y, call.y_scale);
    }
    const auto matrix = [&](std::int64_t group) {
        return from_blocks(matrices[group], call.scale[0][group], 0).to(at::kDouble);
    };
    const auto units = grouped_units(x, matrix, call.list, call.list_type == 1);
    to_blocks(units, first_rows(call.y, units), first_rows(call.y_scale, units));
}

constexpr Members<&GroupedSwiglu::x, &GroupedSwiglu::weight, &GroupedSwiglu::scale, &GroupedSwiglu::assist,
                  &GroupedSwiglu::bias, &GroupedSwiglu::token_scale, &GroupedSwiglu::smooth_scale, &GroupedSwiglu::list,
                  &GroupedSwiglu::dequant_mode, &GroupedSwiglu::dequant_dtype, &GroupedSwiglu::quant_mode,
                  &GroupedSwiglu::list_type, &GroupedSwiglu::tuning, &GroupedSwiglu::y, &GroupedSwiglu::y_scale>
    kGroupedSwiglu;
const Formula<"aclnnGroupedMatmulSwigluQuantWeightNzV2", collected<of_tiles_v2, kGroupedSwiglu>>
    grouped_units_to_int8_v2{
        {"x", {ACL_INT8}, "M K"},      {"weight", {ACL_INT8}},       {"weightScale", kFloats},
        {"weightAssistMatrix"},        {"xScale", kFloat, "M"},      {"groupList", {ACL_INT64}, "E"},
        {"output", {ACL_INT8}, "M *"}, {"outputScale", kFloat, "M"},
};
const Formula<"aclnnGroupedMatmulSwigluQuantV2", collected<of_rows_v2, kGroupedSwiglu>> grouped_units_of_rows{
    {"x", kBytesOfBlocks | Dtypes{ACL_INT8}, "M K"},
    {"weight", kBytesOfBlocks | Dtypes{ACL_INT8}},
    {"weightScale", kFloats | kBlockScales},
    {"weightAssistMatrix"},
    {"xScale", kFloat | kBlockScales},
    {"groupList", {ACL_INT64}, "E"},
    {"output", kBytesOfBlocks | Dtypes{ACL_INT8}, "M *"},
    {"outputScale", kFloat | kBlockScales},
};

}  // namespace
}  // namespace host_npu
