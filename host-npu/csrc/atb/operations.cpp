// The smaller operations of ATB.
#include "atb/computed.h"

namespace atb {
namespace {

// The number of elements of a token in a cache (blocks, tokens of a block, heads, size).
std::int64_t elements_of_token(const at::Tensor& cache) { return c10::multiply_integers(cache.sizes().slice(2)); }

void require_fit(const at::Tensor& cache, const at::Tensor& rows, const at::Tensor& slots) {
    require_int32("slot_indices", slots);
    TORCH_CHECK(slots.dim() == 1 && rows.dim() >= 1 && slots.size(0) == rows.size(0), "slot_indices has shape ",
                slots.sizes(), " instead of one index for each token of a tensor of shape ", rows.sizes());
    TORCH_CHECK(cache.dim() >= 3 && rows.numel() == rows.size(0) * elements_of_token(cache), "tokens of shape ",
                rows.sizes(), " do not fit a cache of shape ", cache.sizes());
    TORCH_CHECK(cache.scalar_type() == rows.scalar_type(), "tokens of dtype ", rows.scalar_type(),
                " do not fit a cache of dtype ", cache.scalar_type());
}

// Returns the cache (blocks, tokens of a block, heads, size) with rows written at `slots`; negative slots are skipped.
at::Tensor with_rows(const at::Tensor& cache, const at::Tensor& rows, const at::Tensor& slots) {
    auto places = cache.flatten(0, 1);
    const auto is_kept = slots.ge(0);
    const auto kept = rows.reshape({rows.size(0), elements_of_token(cache)}).index({is_kept});
    places.flatten(1).index_put_({slots.to(at::kLong).index({is_kept})}, kept);
    return cache;
}

void require_heads(const at::Tensor& x, const at::Tensor& cos, std::int64_t coefficient) {
    TORCH_CHECK(coefficient == 2 || coefficient == cos.size(-1), "rotaryCoeff is ", coefficient,
                " instead of 2 (halves) or the ", cos.size(-1), " elements of a head (neighbors)");
    TORCH_CHECK(cos.dim() == 2 && cos.size(1) > 0 && cos.size(1) % 2 == 0 && x.size(0) == cos.size(0) &&
                    (x.numel() == 0 || x.numel() % cos.numel() == 0),
                "a tensor of shape ", x.sizes(), " is not made of heads for angles of shape ", cos.sizes());
}

// cos and sin have the angles of one head for each token.
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool is_half) {
    if (x.numel() == 0) return x;
    const auto size = cos.size(-1);
    const auto heads = x.to(at::kFloat).reshape({cos.size(0), -1, size});
    at::Tensor turned;
    if (is_half) {
        const auto halves = heads.chunk(2, -1);
        turned = at::cat({-halves[1], halves[0]}, -1);
    } else {
        const auto pairs = heads.unflatten(-1, {-1, 2});
        turned = at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
    }
    return heads * cos.to(at::kFloat).unsqueeze(1) + turned * sin.to(at::kFloat).unsqueeze(1);
}

void require_groups(const at::Tensor& x, const infer::GroupTopkParam& parameters) {
    TORCH_CHECK(x.dim() == 2 && parameters.groups > 0 && parameters.k > 0 && parameters.k <= parameters.groups &&
                    x.size(1) % parameters.groups == 0,
                "self has shape ", x.sizes(), " whose columns do not make ", parameters.groups, " groups of which ",
                parameters.k, " are chosen");
}

void require_scale(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& offset, const at::Tensor& y) {
    TORCH_CHECK((x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) &&
                    scale.scalar_type() == x.scalar_type() && offset.scalar_type() == at::kChar &&
                    y.scalar_type() == at::kChar,
                "the dtypes are ", x.scalar_type(), ", ", scale.scalar_type(), ", ", offset.scalar_type(), " and ",
                y.scalar_type(), "; ATB takes float16 or bfloat16 for x and scale, and Char for zero_point and y");
    TORCH_CHECK(
        scale.numel() == 1 || (scale.dim() <= x.dim() && scale.sizes() == x.sizes().slice(x.dim() - scale.dim())),
        "scale of shape ", scale.sizes(), " does not have the last sizes of x, of shape ", x.sizes());
    TORCH_CHECK(offset.numel() == 0 || offset.numel() == scale.numel(), "zero_point has shape ", offset.sizes(),
                " instead of that of scale, ", scale.sizes());
    TORCH_CHECK(y.sizes() == x.sizes(), "y has shape ", y.sizes(), " instead of that of x, ", x.sizes());
}

void require_norm(const Tensors& in, const at::Tensor& output) {
    const auto& x = in[0];
    TORCH_CHECK(
        (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) && x.dim() > 0 && x.size(-1) % 16 == 0,
        "self has dtype ", x.scalar_type(), " and shape ", x.sizes(),
        "; ATB takes float16 or bfloat16, and rows of a multiple of 16 elements");
    const auto require = [](const char* name, const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes) {
        TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes() == sizes, name, " has dtype ", tensor.scalar_type(),
                    " and shape ", tensor.sizes(), " instead of ", dtype, " and ", sizes);
    };
    const auto columns = x.size(-1);
    const auto is_row = in[1].dim() > 0 && in[1].size(-1) == columns && in[1].numel() == columns;
    require("gamma", in[1], x.scalar_type(), is_row ? in[1].sizes() : at::IntArrayRef(columns));
    require("beta", in.at(2), x.scalar_type(), in[1].sizes());
    require("scale", in.at(3), x.scalar_type(), {1});
    require("offset", in.at(4), at::kChar, {1});
    require("output", output, at::kChar, x.sizes());
}

at::Tensor quantized(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& offset) {
    auto scaled = x.to(at::kFloat) / scale.to(at::kFloat);
    if (offset.numel() > 0) scaled = scaled + offset.reshape(scale.sizes());
    return scaled.round().nan_to_num(0).clamp(-128, 127).to(at::kChar);
}

}  // namespace

at::Tensor of_largest_groups(const at::Tensor& x, const infer::GroupTopkParam& parameters) {
    const auto groups = x.unflatten(1, {parameters.groups, -1});
    const auto largest =
        std::get<0>(at::topk(groups.to(at::kFloat), parameters.has_sums ? parameters.n : 1, -1)).sum(-1);
    const auto chosen = largest_columns(largest, parameters.k);
    const auto is_kept = at::zeros_like(largest, at::kBool).scatter(1, chosen, true);
    return (groups * is_kept.unsqueeze(-1)).flatten(1);
}

at::Tensor largest_columns(const at::Tensor& x, std::int64_t k) {
    return std::get<1>(at::sort(x, /*stable=*/true, -1, /*descending=*/true)).slice(1, 0, k);
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::ReshapeAndCacheParam& parameters, Operation** operation) {
    require_simulated(parameters.compression == 0 && parameters.cache != infer::Cache::kTiled,
                      "ReshapeAndCache with compression or a cache in FRACTAL_NZ");
    // Inputs: keys, values, their caches and slots; or keys, their cache and slots.
    const std::size_t caches = parameters.cache == infer::Cache::kKeys ? 1 : 2;
    const auto check = [caches](const Tensors& inputs, const Tensors&) {
        for (std::size_t index = 0; index < caches; ++index) {
            require_fit(inputs.at(caches + index), inputs[index], inputs.at(2 * caches));
        }
        const auto blocks = [&](std::size_t input) { return inputs[input].sizes().slice(0, 2); };
        TORCH_CHECK(caches == 1 || blocks(2) == blocks(3), "value_cache has shape ", inputs[caches + 1].sizes(),
                    ", which does not have the blocks of key_cache, of shape ", inputs[caches].sizes());
    };
    const auto compute = [caches](const Tensors& inputs) {
        Tensors outputs;
        for (std::size_t index = 0; index < caches; ++index) {
            outputs.push_back(with_rows(inputs[caches + index], inputs[index], inputs[2 * caches]));
        }
        return outputs;
    };
    *operation = new Computed("ReshapeAndCache", {check, compute});
    return 0;
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::RopeParam& parameters, Operation** operation) {
    const auto coefficient = parameters.rotary_coefficient;
    const auto check = [coefficient](const Tensors& inputs, const Tensors&) {
        for (const auto input : {0, 1}) require_heads(inputs[input], inputs.at(2), coefficient);
        TORCH_CHECK(inputs.at(3).sizes() == inputs[2].sizes(), "sin has shape ", inputs[3].sizes(),
                    " instead of that of cos, ", inputs[2].sizes());
    };
    const auto compute = [coefficient](const Tensors& inputs) {
        return Tensors{rotated(inputs[0], inputs[2], inputs[3], coefficient == 2),
                       rotated(inputs[1], inputs[2], inputs[3], coefficient == 2)};
    };
    *operation = new Computed("Rope", {check, compute});
    return 0;
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::GroupTopkParam& parameters, Operation** operation) {
    const auto check = [parameters](const Tensors& inputs, const Tensors&) { require_groups(inputs[0], parameters); };
    const auto compute = [parameters](const Tensors& inputs) {
        return Tensors{of_largest_groups(inputs[0], parameters)};
    };
    *operation = new Computed("GroupTopk", {check, compute});
    return 0;
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::ElewiseParam& parameters, Operation** operation) {
    require_simulated(parameters.kind == infer::ElewiseParam::Kind::kQuantPerChannel,
                      "Elewise with elewiseType " + std::to_string(int(parameters.kind)));
    const auto check = [](const Tensors& inputs, const Tensors& outputs) {
        require_scale(inputs[0], inputs.at(1), inputs.at(2), outputs.at(0));
    };
    const auto compute = [](const Tensors& inputs) { return Tensors{quantized(inputs[0], inputs[1], inputs[2])}; };
    *operation = new Computed("Elewise", {check, compute});
    return 0;
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::RmsNormParam& parameters, Operation** operation) {
    const auto norm = parameters.norm;
    require_simulated(parameters.kind == infer::RmsNormParam::Kind::kNorm &&
                          norm.quantization == infer::RmsNormParam::Norm::Quantization::kInt8,
                      "RmsNorm other than that of int8");
    const auto check = [](const Tensors& inputs, const Tensors& outputs) { require_norm(inputs, outputs.at(0)); };
    const auto compute = [norm](const Tensors& inputs) {
        const auto x = inputs[0].to(at::kFloat);
        const auto normal = x * at::rsqrt(x.square().mean(-1, true) + norm.epsilon);
        const auto shifted = normal * inputs[1].flatten().to(at::kFloat) + inputs[2].flatten().to(at::kFloat);
        return Tensors{quantized(shifted, inputs[3], inputs[4])};
    };
    *operation = new Computed("RmsNorm", {check, compute});
    return 0;
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::LinearParam& parameters, Operation** operation) {
    require_simulated(parameters.accumulates && !parameters.has_bias && parameters.out_dtype == ACL_DT_UNDEFINED &&
                          parameters.transpose_a && !parameters.transpose_b,
                      "Linear other than x.T @ weight that is added to a result");
    const auto check = [](const Tensors& inputs, const Tensors&) {
        const auto &x = inputs[0], &weight = inputs[1], &sum = inputs.at(2);
        TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(0) == weight.size(0) &&
                        sum.sizes() == at::IntArrayRef({x.size(1), weight.size(1)}),
                    "x.T @ weight of shapes ", x.sizes(), " and ", weight.sizes(), " does not fit C of shape ",
                    sum.sizes());
        TORCH_CHECK(sum.scalar_type() == at::kFloat, "C has dtype ", sum.scalar_type(), " instead of Float");
    };
    const auto compute = [](const Tensors& inputs) {
        return Tensors{inputs[2] + at::matmul(inputs[0].to(at::kFloat).t(), inputs[1].to(at::kFloat))};
    };
    *operation = new Computed("Linear", {check, compute});
    return 0;
}

}  // namespace atb
