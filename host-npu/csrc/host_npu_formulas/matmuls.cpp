// Matrix products combined with other operations.
#include <numeric>

#include "ascendcl/device.h"
#include "host_npu_formulas/halves.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

using Sizes = std::vector<std::int64_t>;

Tensor activated_by(const Tensor& x, const std::string& name) {
    if (name == "gelu") return at::gelu(x, "tanh");  // like Gelu of Ascend C
    if (name == "fastgelu") return x * at::sigmoid(x * 1.702);
    if (name == "relu") return at::relu(x);
    if (name == "silu") return at::silu(x);
    // A gate: the second half is activated, like GeGLU, SwiGLU and ReGlu of Ascend C.
    const auto parts = halves(x, -1);
    if (name == "geglu") return parts.first * at::gelu(parts.second, "tanh");
    if (name == "swiglu") return parts.first * at::silu(parts.second);
    if (name == "reglu") return parts.first * at::relu(parts.second);
    TORCH_CHECK(false, "activation is ", name, " instead of gelu, fastgelu, relu, silu, geglu, swiglu or reglu");
}

// CANN supports gates only without experts, in float16 and with innerPrecise 1.
void require_gate(const std::string& name, bool has_experts, at::ScalarType dtype, std::int64_t precise) {
    if (!name.ends_with("glu")) return;
    TORCH_CHECK(!has_experts && dtype == at::kHalf && precise == 1, "activation is ", name, " with ",
                has_experts ? "experts" : "no experts", ", dtype ", name_of(dtype), " and innerPrecise ", precise,
                "; CANN takes gates without experts, in float16 and with innerPrecise 1");
}

// Dequantizes int8 weights, with a scale and an offset per column, or per group of rows and column.
Tensor dequantized(const AnyTensor& weight, const OptionalTensor& scale, const OptionalTensor& offset) {
    if (!scale) return weight.scalar_type() == at::kChar ? Tensor(weight) : widened(weight);
    const auto of_rows = [&](const Tensor& x) {
        if (x.dim() < weight.dim()) return x.unsqueeze(-2);
        const auto rows = weight.size(-2), groups = x.size(-2);
        TORCH_CHECK(groups > 0 && rows % groups == 0, "antiquantScale and antiquantOffset have ", groups,
                    " groups, which do not divide the ", rows, " rows of a weight");
        return x.repeat_interleave(rows / groups, -2);
    };
    const auto numbers = widened(weight);
    return (offset ? numbers + of_rows(*offset) : numbers) * of_rows(*scale);
}

// Two layers; each expert has its own matrices and rows.
void ffn(const AnyTensor& x, const AnyTensor& weight1, const AnyTensor& weight2, const Sizes& tokens,
         const OptionalAnyTensor& bias1, const OptionalAnyTensor& bias2, const OptionalTensor& scale,
         const OptionalTensor& offset, const OptionalAnyTensor& deq_scale1, const OptionalAnyTensor& deq_scale2,
         const OptionalTensor& antiquant_scale1, const OptionalTensor& antiquant_scale2,
         const OptionalTensor& antiquant_offset1, const OptionalTensor& antiquant_offset2,
         const std::string& activation, std::int64_t precise, bool are_ends, const Out& out) {
    const bool quantizes = x.scalar_type() == at::kChar, has_int8 = weight1.scalar_type() == at::kChar;
    require_gate(activation, !tokens.empty(), has_int8 ? at::kChar : out.dtype(), precise);
    const auto experts = tokens.empty() ? "" : std::to_string(tokens.size()) + " ";
    std::vector<Shaped> shaped{{"x", x.sizes(), "* ... K1"},
                               {"weight1", weight1.sizes(), experts + "K1 N1"},
                               {"weight2", weight2.sizes(), experts + "K2 K1"}};
    const auto require = [&](const char* name, const auto& tensor, const std::string& shape) {
        if (tensor) shaped.push_back({name, tensor->sizes(), shape});
    };
    const auto one = tokens.empty() ? "1" : experts, columns1 = experts + "N1", columns2 = experts + "K1";
    require("bias1", bias1, columns1);
    require("bias2", bias2, columns2);
    require("scale", scale, one + " | " + columns1);
    require("offset", offset, one);
    require("deqScale1", deq_scale1, columns1);
    require("deqScale2", deq_scale2, columns2);
    for (const auto& [name, tensor] :
         {std::pair("antiquantScale1", antiquant_scale1), {"antiquantOffset1", antiquant_offset1}}) {
        require(name, tensor, columns1 + " | " + experts + "G1 N1");
    }
    for (const auto& [name, tensor] :
         {std::pair("antiquantScale2", antiquant_scale2), {"antiquantOffset2", antiquant_offset2}}) {
        require(name, tensor, columns2 + " | " + experts + "G2 K1");
    }
    require_shapes(shaped);
    TORCH_CHECK(!quantizes || (scale && deq_scale1 && deq_scale2),
                "x has dtype int8, with which CANN takes scale, deqScale1 and deqScale2");
    TORCH_CHECK(quantizes || !has_int8 || (antiquant_scale1 && antiquant_scale2), "the weights have dtype int8 and x ",
                name_of(x.scalar_type()), ", with which CANN takes antiquantScale1 and antiquantScale2");
    TORCH_CHECK(!quantizes || deq_scale1->scalar_type() != at::kFloat ||
                    scale->numel() <= std::max<std::int64_t>(1, std::ssize(tokens)),
                "scale has shape ", scale->sizes(), ", of columns, with which CANN takes no deqScale of float32");
    const Tensor matrices[] = {dequantized(weight1, antiquant_scale1, antiquant_offset1),
                               dequantized(weight2, antiquant_scale2, antiquant_offset2)};
    const auto layers = [&](const Tensor& rows, std::optional<std::int64_t> expert) {
        const auto of = [&](const Tensor& all) { return expert ? all[*expert] : all; };
        const auto product = [&](const Tensor& left, const Tensor& matrix, const OptionalAnyTensor& bias,
                                 const OptionalAnyTensor& deq_scale) {
            const auto dtype = quantizes ? at::kDouble : at::kFloat;
            auto y = left.to(dtype).matmul(of(matrix).to(dtype));
            if (bias) y = y + of(*bias).to(dtype);
            return deq_scale ? (y * of(scale_of(*deq_scale))).to(at::kFloat) : y;
        };
        auto hidden = activated_by(product(rows, matrices[0], bias1, deq_scale1), activation);
        if (quantizes) {
            hidden = hidden * of(*scale);
            hidden = saturated(offset ? hidden + of(*offset) : hidden, at::kChar);
        }
        return product(hidden, matrices[1], bias2, deq_scale2);
    };
    if (tokens.empty()) {
        out = layers(x, std::nullopt);
        return;
    }
    auto sizes = tokens;
    if (are_ends) std::adjacent_difference(sizes.begin(), sizes.end(), sizes.begin());
    std::vector<Tensor> results;
    for (const auto& part : x.flatten(0, -2).split_with_sizes(sizes)) {
        results.push_back(layers(part, static_cast<std::int64_t>(results.size())));
    }
    out = at::cat(results).view(out.sizes());
}
std::vector<aclDataType> ffn_dtypes(aclDataType x, aclDataType weight, aclDataType bias, aclDataType scale,
                                    aclDataType deq_scale, aclDataType antiquant, aclDataType y) {
    return {x,         weight,    weight,    bias,      bias,      scale,     scale,
            deq_scale, deq_scale, antiquant, antiquant, antiquant, antiquant, y};
}
constexpr auto kAbsent = ACL_DT_UNDEFINED;
const Formula<"aclnnFFNV2", ffn> feed_forward{
    TensorRules{{"x", kHalves | Dtypes{ACL_INT8}},
                {"weight1", kHalves | Dtypes{ACL_INT8}},
                {"weight2", kHalves | Dtypes{ACL_INT8}},
                {"bias1", {ACL_FLOAT16, ACL_FLOAT, ACL_INT32}},
                {"bias2", {ACL_FLOAT16, ACL_FLOAT, ACL_INT32}},
                {"scale", kFloat},
                {"offset", kFloat},
                {"deqScale1", {ACL_INT64, ACL_FLOAT, ACL_BF16}},
                {"deqScale2", {ACL_INT64, ACL_FLOAT, ACL_BF16}},
                {"antiquantScale1", kHalves},
                {"antiquantScale2", kHalves},
                {"antiquantOffset1", kHalves},
                {"antiquantOffset2", kHalves},
                {"y", kHalves}},
    Together{{"x", "weight1", "weight2", "bias1", "bias2", "scale", "offset", "deqScale1", "deqScale2",
              "antiquantScale1", "antiquantScale2", "antiquantOffset1", "antiquantOffset2", "y"},
             {ffn_dtypes(ACL_FLOAT16, ACL_FLOAT16, ACL_FLOAT16, kAbsent, kAbsent, kAbsent, ACL_FLOAT16),
              ffn_dtypes(ACL_BF16, ACL_BF16, ACL_FLOAT, kAbsent, kAbsent, kAbsent, ACL_BF16),
              ffn_dtypes(ACL_INT8, ACL_INT8, ACL_INT32, ACL_FLOAT, ACL_INT64, kAbsent, ACL_FLOAT16),
              ffn_dtypes(ACL_INT8, ACL_INT8, ACL_INT32, ACL_FLOAT, ACL_FLOAT, kAbsent, ACL_FLOAT16),
              ffn_dtypes(ACL_INT8, ACL_INT8, ACL_INT32, ACL_FLOAT, ACL_BF16, kAbsent, ACL_BF16),
              ffn_dtypes(ACL_FLOAT16, ACL_INT8, ACL_FLOAT16, kAbsent, kAbsent, ACL_FLOAT16, ACL_FLOAT16),
              ffn_dtypes(ACL_BF16, ACL_INT8, ACL_FLOAT, kAbsent, kAbsent, ACL_BF16, ACL_BF16)}}};

// CANN does not support a bias. The result is [rows, batches, columns], or has the batches of each part side by side.
void transpose_batch_matmul(const Tensor& x1, const Tensor& x2, Without<"bias">, Without<"scale">, const Sizes& perm1,
                            const Sizes& perm2, const Sizes& perm_y, std::int8_t, std::int32_t batch_split_factor,
                            const Out& out) {
    const Sizes as_is{0, 1, 2}, rows_first{1, 0, 2}, columns_first{0, 2, 1};
    TORCH_CHECK(
        (perm1 == as_is || perm1 == rows_first) && (perm2 == as_is || perm2 == columns_first) && perm_y == rows_first,
        "permX1, permX2 and permY are ", at::IntArrayRef(perm1), ", ", at::IntArrayRef(perm2), " and ",
        at::IntArrayRef(perm_y), "; CANN takes [0, 1, 2] or [1, 0, 2], [0, 1, 2] or [0, 2, 1], and [1, 0, 2]");
    TORCH_CHECK(soc() == Soc::Ascend950 || perm2 == as_is || (perm1 == rows_first && batch_split_factor == 1),
                "permX2 is ", at::IntArrayRef(perm2),
                "; CANN takes it with the permX1 [1, 0, 2] and the batchSplitFactor 1 on this chip");
    auto y = at::bmm(x1.permute(perm1), x2.permute(perm2)).transpose(0, 1);
    TORCH_CHECK(batch_split_factor > 0 && y.size(1) % batch_split_factor == 0, y.size(1), " batches are not ",
                batch_split_factor, " parts");
    if (batch_split_factor > 1) y = y.unflatten(1, {batch_split_factor, -1}).transpose(0, 1).flatten(2);
    out = y;
}
const Formula<"aclnnTransposeBatchMatMul", transpose_batch_matmul> product_of_permuted{
    {"x1", kFloats, "* * *"}, {"x2", as("x1"), "* * *"}, {"out", kFloats, "* * *"}};

// Expands a number per column, or per group of rows and column, to the matrix.
Tensor of_matrix(const Tensor& numbers, const Tensor& matrix, std::int64_t group_size) {
    if (numbers.numel() == 1 || group_size <= 0) return numbers.flatten();
    return numbers.repeat_interleave(group_size, 0).slice(0, 0, matrix.size(0));
}

void weight_quant_v3(const Tensor& x, const IntegerTensor& weight, const Tensor& scale, const OptionalTensor& offset,
                     const OptionalAnyTensor& quant_scale, Without<"quant_offset">, const OptionalTensor& bias,
                     std::int32_t group_size, std::int32_t, const Out& out) {
    TORCH_CHECK(weight.scalar_type() == at::kChar, "the host NPU takes weights of int8 only, not ",
                weight.scalar_type());
    auto matrix = widened(weight);
    if (offset) matrix = matrix + of_matrix(*offset, matrix, group_size);
    auto y = x.matmul(matrix * of_matrix(scale, matrix, group_size));
    if (bias) y = y + *bias;
    TORCH_CHECK(quant_scale.has_value() == (out.dtype() == at::kChar), "the result has dtype ", name_of(out.dtype()),
                "; CANN takes int8 with quant_scale, and only then");
    out = quant_scale ? saturated(y * scale_of(*quant_scale) + offset_of(*quant_scale), at::kChar) : y;
}
const Formula<"aclnnWeightQuantBatchMatmulV3", weight_quant_v3> product_with_int8_v3;

void weight_quant_v2(const Tensor& x, const IntegerTensor& weight, const Tensor& scale, const OptionalTensor& offset,
                     const OptionalAnyTensor& quant_scale, Without<"quant_offset"> none, const OptionalTensor& bias,
                     std::int32_t group_size, const Out& out) {
    weight_quant_v3(x, weight, scale, offset, quant_scale, none, bias, group_size, 0, out);
}
const Formula<"aclnnWeightQuantBatchMatmulV2", weight_quant_v2> product_with_int8;

// Quantizes each row of x and multiplies the rows by a quantized weight.
Tensor product_of_rows(const Tensor& x, const OptionalTensor& smooth, const Tensor& weight, const Tensor& scale,
                       const OptionalTensor& bias) {
    const auto [rows, of_rows] = quantized_rows(smooth ? x * *smooth : x);
    const auto sums = rows.to(at::kDouble).matmul(weight.to(at::kDouble).mT());
    const auto y = (sums * scale.flatten() * of_rows.unsqueeze(-1)).to(at::kFloat);
    return bias ? y + *bias : y;
}

void require_rows(const Tensor& weight, const std::string& mode, bool transposed) {
    TORCH_CHECK(mode == "pertoken" && transposed && weight.scalar_type() == at::kChar,
                "the host NPU quantizes x by tokens, for weights of int8 with transposed matrices only");
}

void quant_matmul_dequant(const Tensor& x, const IntegerTensor& weight, const AnyTensor& scale,
                          const OptionalTensor& bias, Without<"x_scale">, Without<"x_offset">,
                          const OptionalTensor& smooth, const std::string& mode, bool transposed, const Out& out) {
    require_rows(weight, mode, transposed);
    out = product_of_rows(x, smooth, weight, scale_of(scale), bias);
}
const Formula<"aclnnQuantMatmulDequant", quant_matmul_dequant> product_of_quantized_rows;

void quant_grouped_matmul_dequant(const Tensor& x, const IntegerTensor& weight, const AnyTensor& scale,
                                  const IntegerTensor& ends, Without<"bias">, Without<"x_scale">, Without<"x_offset">,
                                  const OptionalTensor& smooth, const std::string& mode, bool transposed,
                                  const Out& out) {
    require_rows(weight, mode, transposed);
    TORCH_CHECK(weight.dim() == 3 && scale.dim() == 2 && ends.dim() == 1 && ends.size(0) == weight.size(0),
                "quantized_weight of shape ", weight.sizes(), " does not fit ", ends.numel(), " groups");
    const auto of = scale_of(scale);
    if (ends.is_meta()) {
        product_of_rows(x.slice(0, 0, 1), smooth, weight[0], of[0], std::nullopt);
        return;
    }
    std::int64_t first = 0;
    for (std::int64_t group = 0; group < ends.size(0); ++group) {
        const auto last = ends[group].item<std::int64_t>();
        TORCH_CHECK(last >= first && last <= x.size(0), "a group ends at ", last, " of ", x.size(0), " rows");
        const auto rows = product_of_rows(x.slice(0, first, last), smooth, weight[group], of[group], std::nullopt);
        out.in_place().slice(0, first, last).copy_(rows);
        first = last;
    }
}
const Formula<"aclnnQuantGroupedMatmulDequant", quant_grouped_matmul_dequant> products_of_quantized_rows;

}  // namespace
}  // namespace host_npu
