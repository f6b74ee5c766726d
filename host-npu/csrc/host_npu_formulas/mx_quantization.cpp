// A scale is a byte, the biased exponent of a power of two. 0 also encodes zero, 255 inf and nan.
//
// A byte packs two 4-bit numbers, the first in the low bits: a sign, and an index into kNumbersOf4Bits.
#include "host_npu_formulas/mx_quantization.h"

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "ascendcl/device.h"
#include "nnopbase/status.h"

namespace host_npu {

void require_mx() { require(soc() == Soc::Ascend950, kRuntimeError, "only the Ascend950 has numbers in MX formats"); }

namespace {

constexpr std::array<float, 8> kNumbersOf4Bits{0, 0.5, 1, 1.5, 2, 3, 4, 6};

std::int64_t packed_dimension_of(const Tensor& x) { return static_cast<std::int64_t>(packed_dimension(x.strides())); }

Tensor unpacked(const Tensor& x) {
    const auto bytes = x.view(at::kByte).to(at::kLong);
    const auto dim = packed_dimension_of(x);
    if (x.is_meta()) return bytes.repeat_interleave(2, dim).to(at::kFloat);
    const auto halves = at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, dim + 1).flatten(dim, dim + 1);
    const auto numbers = at::tensor(at::ArrayRef<float>(kNumbersOf4Bits)).index({halves.bitwise_and(7)});
    return at::where(halves.gt(7), -numbers, numbers);
}

// Packs pairs of numbers along the last dimension.
Tensor packed(const Tensor& x, const std::string& rounding) {
    std::vector<float> ends;
    for (std::size_t code = 0; code + 1 < kNumbersOf4Bits.size(); ++code) {
        const auto middle = (kNumbersOf4Bits[code] + kNumbersOf4Bits[code + 1]) / 2;
        // Round to nearest; ties to the even code (rint) or away from 0 (round).
        ends.push_back(rounding == "round" || code % 2 == 1 ? std::nextafter(middle, 0.0F) : middle);
    }
    auto code = at::bucketize(x.abs(), at::tensor(ends));
    if (rounding == "floor") {
        const auto numbers = at::tensor(at::ArrayRef<float>(kNumbersOf4Bits));
        code = at::where(x.lt(0), at::bucketize(x.abs(), numbers), at::bucketize(x, numbers, false, true) - 1);
    }
    const auto halves = (code + at::signbit(x) * 8).to(at::kByte).unflatten(-1, {-1, 2});
    return halves.select(-1, 0) + halves.select(-1, 1) * 16;
}

Tensor floats_of_numbers(const Tensor& x) {
    return x.scalar_type() == at::kFloat4_e2m1fn_x2 ? unpacked(x) : widened(x);
}

}  // namespace

void require_factors(const Tensor& x, const Tensor& weight) {
    const auto has_4_bits = [](const Tensor& one) { return one.scalar_type() == at::kFloat4_e2m1fn_x2; };
    const auto is_float8 = [](const Tensor& one) {
        return one.scalar_type() == at::kFloat8_e4m3fn || one.scalar_type() == at::kFloat8_e5m2;
    };
    TORCH_CHECK((is_float8(x) && is_float8(weight)) || (has_4_bits(x) && has_4_bits(weight)),
                "matrices in blocks have dtypes ", name_of(x.scalar_type()), " and ", name_of(weight.scalar_type()),
                " instead of float8_e4m3fn or float8_e5m2, or both float4_e2m1");
    if (!has_4_bits(x)) return;
    TORCH_CHECK(packed_dimension_of(x) == x.dim() - 1 && packed_dimension_of(weight) == weight.dim() - 2,
                "matrices of float4_e2m1 need the pairs of numbers in the dimension that is summed over: x in rows,"
                " and the weight as the transposed view of [N, K]");
    const auto count = (2 * x.size(-1) + kMxBlock - 1) / kMxBlock;
    TORCH_CHECK(count % 2 == 0, "matrices of float4_e2m1 have K = ", 2 * x.size(-1), ", which is ", count,
                " blocks of 32 instead of an even number");
}

Tensor from_blocks(const Tensor& matrix, const Tensor& scale, std::int64_t axis) {
    const auto x = floats_of_numbers(matrix);
    const auto dim = c10::maybe_wrap_dim(axis, x.dim());
    auto shape = x.sizes().vec();
    shape[dim] = (shape[dim] + 2 * kMxBlock - 1) / (2 * kMxBlock);
    shape.push_back(2);
    TORCH_CHECK(scale.sizes() == at::IntArrayRef(shape), "a scale has shape ", scale.sizes(), " instead of ",
                at::IntArrayRef(shape), ", two for each 64 numbers along dimension ", dim, " of ", x.sizes());
    const auto of_numbers = scale.movedim(dim, -2).flatten(-2).repeat_interleave(kMxBlock, -1);
    return x * widened(of_numbers.slice(-1, 0, x.size(dim)).movedim(-1, dim));
}

namespace {

// The range of a block's quantized dtype.
struct Element {
    std::int64_t largest_exponent;
    double largest;
};

Element element_of(at::ScalarType dtype) {
    if (dtype == at::kFloat4_e2m1fn_x2) return {2, 6};
    return dtype == at::kFloat8_e4m3fn ? Element{8, 448} : Element{15, 57344};
}

struct Rounding {
    // 0: maps the exponent of the block's maximum to the largest exponent of the dtype; larger numbers saturate. 1:
    // rounds the exponent up, so that nothing saturates.
    std::int64_t algorithm;
    // The lower bound of a block's maximum, for algorithm 1.
    double least;
    // The rounding of 4-bit numbers: rint, floor or round.
    std::string mode = "rint";
};

constexpr std::int64_t kMantissaBits = 23;

Tensor bits_of(const Tensor& floats) { return floats.contiguous().view(at::kInt); }

Tensor exponents_rounded_up(const Tensor& scales) {
    constexpr std::int64_t half = std::int64_t{1} << (kMantissaBits - 1);
    const auto bits = bits_of(scales);
    const auto exponent = bits.bitwise_right_shift(kMantissaBits), mantissa = bits.bitwise_and(2 * half - 1);
    const auto is_normal = exponent.gt(0).logical_and(exponent.lt(254)).logical_and(mantissa.gt(0));
    return exponent + is_normal.logical_or(exponent.eq(0).logical_and(mantissa.gt(half)));
}

// Returns the scales of blocks with these maxima, and the factors of their numbers.
std::pair<Tensor, Tensor> scales_of(const Tensor& largest, const Element& element, const Rounding& rounding) {
    const auto exponent = bits_of(largest).bitwise_right_shift(kMantissaBits);
    Tensor scale, is_zero;
    if (rounding.algorithm == 0) {
        scale = (exponent - element.largest_exponent).clamp_min(0);
        is_zero = scale.eq(0);
    } else {
        is_zero = largest.eq(0);
        scale = exponents_rounded_up(largest.clamp_min(rounding.least) * (1 / element.largest)).masked_fill(is_zero, 0);
    }
    const auto is_infinite = exponent.eq(255);
    const auto factor = (254 - scale).to(at::kInt).bitwise_left_shift(kMantissaBits).view(at::kFloat);
    return {scale.masked_fill(is_infinite, 255).to(at::kByte),
            factor.masked_fill(is_zero, 0).masked_fill(is_infinite, std::numeric_limits<float>::quiet_NaN())};
}

void quantize_blocks(const Tensor& x, std::int64_t axis, std::int64_t size, const Rounding& rounding, const Out& y,
                     const Out& scale_out) {
    const auto element = element_of(y.dtype());
    const auto dim = c10::maybe_wrap_dim(axis, x.dim());
    const auto length = x.size(dim), count = (length + size - 1) / size;
    const auto padded = at::constant_pad_nd(x.movedim(dim, -1), {0, count * size - length});
    const auto blocks = padded.unflatten(-1, {count, size});
    const auto [scale, factor] = scales_of(blocks.abs().amax(-1), element, rounding);
    const auto numbers = (blocks * factor.unsqueeze(-1)).clamp(-element.largest, element.largest);
    const auto quantized = numbers.flatten(-2).slice(-1, 0, length).movedim(-1, dim);
    if (y.dtype() == at::kFloat4_e2m1fn_x2) {
        y.in_place().view(at::kByte).copy_(packed(quantized, rounding.mode));
    } else {
        y = quantized;
    }
    const auto pairs = at::constant_pad_nd(scale, {0, count % 2}).unflatten(-1, {-1, 2});
    scale_out = pairs.movedim(-2, dim).contiguous().view(at::kFloat8_e8m0fnu);
}

}  // namespace

void to_blocks(const Tensor& x, const Out& y, const Out& scale) { quantize_blocks(x, -1, kMxBlock, {0, 0}, y, scale); }

namespace {

void require_options(const Tensor& x, std::int64_t type, const Rounding& rounding, double largest) {
    require_mx();
    const bool has_4_bits = type == ACL_FLOAT4_E2M1;
    TORCH_CHECK(has_4_bits || type == ACL_FLOAT8_E4M3FN || type == ACL_FLOAT8_E5M2, "the host NPU quantizes blocks to",
                " float8_e4m3fn, float8_e5m2 and float4_e2m1 only, not to aclDataType ", type);
    const auto& mode = rounding.mode;
    TORCH_CHECK(mode == "rint" || (has_4_bits && (mode == "floor" || mode == "round")), "roundMode is ", mode,
                " instead of rint", has_4_bits ? ", floor or round" : "");
    TORCH_CHECK(rounding.algorithm == 0 || (rounding.algorithm == 1 && !has_4_bits), "scaleAlg is ", rounding.algorithm,
                " instead of 0", has_4_bits ? ", the only one that the host NPU has for float4_e2m1" : " or 1");
    TORCH_CHECK(largest == 0, "dstTypeMax is ", largest, " instead of 0, as numbers of 8 bits and scaleAlg 0 need");
    TORCH_CHECK(rounding.least >= 0 && (rounding.least == 0 || rounding.algorithm == 1), "maxLowBound is ",
                rounding.least, " with scaleAlg ", rounding.algorithm,
                "; it must not be negative, and be 0 unless that is 1");
    TORCH_CHECK(x.dim() >= 1 && x.dim() <= 7, "x has ", x.dim(), " dimensions instead of 1 to 7");
}

std::string mode_or_default(const std::string& mode) { return mode.empty() ? "rint" : mode; }

void dynamic_mx_quant_v3(const AnyTensor& x, std::int64_t axis, const std::string& mode, std::int64_t type,
                         std::int64_t size, std::int64_t algorithm, double largest, double least, const Out& y,
                         const Out& scale) {
    const Rounding rounding{algorithm, least, mode_or_default(mode)};
    require_options(x, type, rounding, largest);
    TORCH_CHECK(size > 0 && size <= 1024 && size % kMxBlock == 0, "blocksize is ", size,
                " instead of a multiple of 32 up to 1024");
    if (x.scalar_type() == at::kFloat) {
        const auto length = x.size(axis);
        TORCH_CHECK(size == kMxBlock, "blocksize is ", size, " instead of 32, which float32 needs");
        TORCH_CHECK(length >= kMxBlock, "x has ", length,
                    " numbers along the axis instead of at least 32, which float32 needs");
    }
    quantize_blocks(widened(x), axis, size, rounding, y, scale);
}
void dynamic_mx_quant_v2(const AnyTensor& x, std::int64_t axis, const std::string& mode, std::int64_t type,
                         std::int64_t size, std::int64_t algorithm, double largest, const Out& y, const Out& scale) {
    dynamic_mx_quant_v3(x, axis, mode, type, size, algorithm, largest, 0, y, scale);
}
void dynamic_mx_quant(const AnyTensor& x, std::int64_t axis, const std::string& mode, std::int64_t type,
                      std::int64_t size, std::int64_t algorithm, const Out& y, const Out& scale) {
    dynamic_mx_quant_v3(x, axis, mode, type, size, algorithm, 0, 0, y, scale);
}
const TensorRules kByBlock{{"x", kFloats, "...x"}, {"yOut", kBlockNumbers, "...x"}, {"mxscaleOut", kBlockScales}};
const Formula<"aclnnDynamicMxQuant", dynamic_mx_quant> by_block{kByBlock};
const Formula<"aclnnDynamicMxQuantV2", dynamic_mx_quant_v2> by_block_v2{kByBlock};
const Formula<"aclnnDynamicMxQuantV3", dynamic_mx_quant_v3> by_block_v3{kByBlock};

// Quantizes along both axes, for products with the matrix and with its transpose.
void of_two_axes_v2(const Tensor& x, const std::string& mode, std::int64_t type, std::int64_t algorithm, double largest,
                    const Out& y1, const Out& scale1, const Out& y2, const Out& scale2) {
    const Rounding rounding{algorithm, 0, mode_or_default(mode)};
    require_options(x, type, rounding, largest);
    quantize_blocks(x, -1, kMxBlock, rounding, y1, scale1);
    quantize_blocks(x, -2, kMxBlock, rounding, y2, scale2);
}
void of_two_axes(const Tensor& x, const std::string& mode, std::int64_t type, std::int64_t algorithm, const Out& y1,
                 const Out& scale1, const Out& y2, const Out& scale2) {
    of_two_axes_v2(x, mode, type, algorithm, 0, y1, scale1, y2, scale2);
}
const TensorRules kTwoAxes{
    {"x", kHalves, "...x M N"},           {"y1Out", kBlockNumbers, "...x M N"}, {"mxscale1Out", kBlockScales},
    {"y2Out", kBlockNumbers, "...x M N"}, {"mxscale2Out", kBlockScales},
};
const Formula<"aclnnDynamicMxQuantWithDualAxis", of_two_axes> by_blocks_of_two_axes{kTwoAxes};
const Formula<"aclnnDynamicMxQuantWithDualAxisV2", of_two_axes_v2> by_blocks_of_two_axes_v2{kTwoAxes};

void anti_mx_quant(const AnyTensor& x, const AnyTensor& scale, std::int64_t axis, std::int64_t, const Out& y) {
    require_mx();
    y = from_blocks(x, scale, axis);
}
const Formula<"aclnnAntiMxQuant", anti_mx_quant> floats_of_blocks{
    {"x", kBlockNumbers, "...x"}, {"mxscale", kBlockScales}, {"y", kFloats, "...x"}};

}  // namespace
}  // namespace host_npu
