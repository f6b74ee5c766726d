// LayerNorm of sums, and GroupNorm with SiLU. gamma and beta have the shape of the last dimensions or of the channels.
#include "host_npu_formulas/norms.h"

namespace host_npu {
namespace {

struct Moments {
    Tensor mean, rstd;
};

Moments moments(const Tensor& x, at::IntArrayRef dims, double epsilon) {
    const auto mean = x.mean(dims, true);
    return {mean, at::rsqrt((x - mean).square().mean(dims, true) + epsilon)};
}

// Checks that mean and rstd have one number for each normalized part of x.
void require_statistics(const Tensor& x, at::IntArrayRef dims, const Tensor& mean, const Tensor& rstd) {
    auto sizes = x.sizes().vec();
    for (const auto dim : dims) sizes[static_cast<std::size_t>(dim + x.dim())] = 1;
    for (const auto& [name, each] : {std::pair("mean", &mean), std::pair("rstd", &rstd)}) {
        TORCH_CHECK(each->sizes() == at::IntArrayRef(sizes), name, " has shape ", each->sizes(), " instead of ",
                    at::IntArrayRef(sizes));
    }
}

// The gradient of (x - mean) * rstd.
Tensor through_norm(const Tensor& grad, const Tensor& unit, const Tensor& rstd, at::IntArrayRef dims) {
    return rstd * (grad - grad.mean(dims, true) - unit * (grad * unit).mean(dims, true));
}

void add_layer_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma, const Tensor& beta,
                    const OptionalTensor& bias, double epsilon, bool sum_wanted, const Out& y, const Out& mean,
                    const Out& rstd, const OptionalOut& sum) {
    const auto x = bias ? x1 + x2 + *bias : x1 + x2;
    const auto [m, r] = moments(x, normalized(x, gamma), epsilon);
    mean = m;
    rstd = r;
    y = (x - m) * r * gamma + beta;
    if (sum_wanted && sum) *sum = x;
}
// Float32 may be added to 16 bits, with a float32 sum; parameters may be float32 for 16-bit tensors.
const Together kDtypesOfSum{{"x1", "x2", "gamma", "yOut"},
                            {{ACL_FLOAT, ACL_FLOAT, ACL_FLOAT, ACL_FLOAT},
                             {ACL_FLOAT, ACL_FLOAT16, ACL_FLOAT, ACL_FLOAT},
                             {ACL_FLOAT, ACL_BF16, ACL_FLOAT, ACL_FLOAT},
                             {ACL_FLOAT16, ACL_FLOAT, ACL_FLOAT, ACL_FLOAT},
                             {ACL_BF16, ACL_FLOAT, ACL_FLOAT, ACL_FLOAT},
                             {ACL_FLOAT16, ACL_FLOAT16, ACL_FLOAT, ACL_FLOAT16},
                             {ACL_BF16, ACL_BF16, ACL_FLOAT, ACL_BF16},
                             {ACL_FLOAT16, ACL_FLOAT16, ACL_FLOAT16, ACL_FLOAT16},
                             {ACL_BF16, ACL_BF16, ACL_BF16, ACL_BF16}}};
const Formula<"aclnnAddLayerNorm", add_layer_norm> layer_norm_of_sum{
    TensorRules{
        {"x1", kFloats, "A ...x"},
        {"x2", kFloats, "A ...x"},
        {"gamma", kFloats, "B ...g"},
        {"beta", as("gamma"), "B ...g"},
        {"biasOptional", as("yOut"), "A ...x | B ...g"},
        {"yOut", kFloats, "A ...x"},
        {"meanOut", kFloat},
        {"rstdOut", kFloat},
        {"xOut", as("yOut"), "A ...x"},
    },
    kDtypesOfSum};

void add_layer_norm_grad(const Tensor& dy, const Tensor& x1, const Tensor& x2, const Tensor& rstd, const Tensor& mean,
                         const Tensor& gamma, const OptionalTensor& dsum, const Out& dx, const Out& dgamma,
                         const Out& dbeta) {
    const auto x = x1 + x2;
    require_statistics(x, normalized(x, gamma), mean, rstd);
    const auto unit = (x - mean) * rstd;
    const auto grad = through_norm(dy * gamma, unit, rstd, normalized(x, gamma));
    dx = dsum ? grad + *dsum : grad;
    dgamma = (dy * unit).sum_to_size(gamma.sizes());
    dbeta = dy.sum_to_size(gamma.sizes());
}
const Formula<"aclnnAddLayerNormGrad", add_layer_norm_grad> layer_norm_of_sum_backward{
    {"dy", kFloats, "A ...x"},
    {"x1", as("dy"), "A ...x"},
    {"x2", as("dy"), "A ...x"},
    {"rstd", kFloat},
    {"mean", kFloat},
    {"gamma", kFloats, "...g"},
    {"dsumOptional", as("dy"), "A ...x"},
    {"dxOut", as("dy"), "A ...x"},
    {"dgammaOut", kFloat, "...g"},
    {"dbetaOut", kFloat, "...g"},
};

void deep_norm(const Tensor& x, const Tensor& gx, const Tensor& beta, const Tensor& gamma, double alpha, double epsilon,
               const Out& mean, const Out& rstd, const Out& y) {
    const auto sum = x * alpha + gx;
    const auto [m, r] = moments(sum, normalized(sum, gamma), epsilon);
    mean = m;
    rstd = r;
    y = (sum - m) * r * gamma + beta;
}
const Formula<"aclnnDeepNorm", deep_norm> deep{
    {"x", kFloats, "A B ...x"}, {"gx", as("x"), "A B ...x"}, {"beta", as("x"), "...g"},     {"gamma", as("x"), "...g"},
    {"meanOut", kFloat},        {"rstdOut", kFloat},         {"yOut", as("x"), "A B ...x"},
};

void deep_norm_grad(const Tensor& dy, const Tensor& x, const Tensor& gx, const Tensor& gamma, const Tensor& mean,
                    const Tensor& rstd, double alpha, const Out& dx, const Out& dgx, const Out& dbeta,
                    const Out& dgamma) {
    require_shapes({{"dy", dy.sizes(), "...dy"}, {"x", x.sizes(), "...dy"}, {"gx", gx.sizes(), "...dy"}});
    const auto sum = x * alpha + gx;
    require_statistics(sum, normalized(sum, gamma), mean, rstd);
    const auto unit = (sum - mean) * rstd;
    const auto grad = through_norm(dy * gamma, unit, rstd, normalized(sum, gamma));
    dx = grad * alpha;
    dgx = grad;
    dbeta = dy.sum_to_size(gamma.sizes());
    dgamma = (dy * unit).sum_to_size(gamma.sizes());
}
const Formula<"aclnnDeepNormGrad", deep_norm_grad> deep_backward{
    {"dy", kFloats},  {"x", kFloats},     {"gx", kFloats},     {"gamma", kFloats},   {"mean", kFloat},
    {"rstd", kFloat}, {"dxOut", kFloats}, {"dgxOut", kFloats}, {"dbetaOut", kFloat}, {"dgammaOut", kFloat},
};

// Views x as [batch, groups, elements of a group].
Tensor in_groups(const Tensor& x, std::int64_t groups) {
    TORCH_CHECK(x.dim() >= 2 && groups > 0 && x.size(1) % groups == 0, x.sizes(), " cannot be in ", groups, " groups");
    return x.reshape({x.size(0), groups, -1});
}

// Views one value per channel so that it broadcasts to x.
Tensor by_channel(const Tensor& value, const Tensor& x) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
    sizes[1] = x.size(1);
    return value.view(sizes);
}

void group_norm(const Tensor& x, const OptionalTensor& gamma, const OptionalTensor& beta, std::int64_t groups,
                double epsilon, bool activated, double swish, const Out& y, const Out& mean, const Out& rstd) {
    const auto grouped = in_groups(x, groups);
    const auto [m, r] = moments(grouped, {-1}, epsilon);
    mean = m.squeeze(-1);
    rstd = r.squeeze(-1);
    auto z = ((grouped - m) * r).view(x.sizes());
    if (gamma) z = z * by_channel(*gamma, x);
    if (beta) z = z + by_channel(*beta, x);
    y = activated ? z * at::sigmoid(z * swish) : z;
}

void group_norm_silu(const Tensor& x, const OptionalTensor& gamma, const OptionalTensor& beta, std::int64_t groups,
                     double epsilon, const Out& y, const Out& mean, const Out& rstd) {
    group_norm(x, gamma, beta, groups, epsilon, true, 1, y, mean, rstd);
}
const Formula<"aclnnGroupNormSilu", group_norm_silu> silu_of_group_norm{
    {"self", kFloats, "N C ..."},
    {"gamma", as("self") | kFloat, "C"},
    {"beta", as("self") | kFloat, "C"},
    {"out", as("self")},
    {"meanOut", kFloats},
    {"rstdOut", kFloats},
};

void group_norm_swish(const Tensor& x, const OptionalTensor& gamma, const OptionalTensor& beta, std::int64_t groups,
                      const std::string&, double epsilon, bool activated, double swish, const Out& y, const Out& mean,
                      const Out& rstd) {
    group_norm(x, gamma, beta, groups, epsilon, activated, swish, y, mean, rstd);
}
const Formula<"aclnnGroupNormSwish", group_norm_swish> swish_of_group_norm{
    {"x", kFloats, "N C ..."}, {"gamma", kFloats, "C"}, {"beta", kFloats, "C"},
    {"yOut", kFloats},         {"meanOut", kFloats},    {"rstdOut", kFloats},
};

void group_norm_swish_grad(const Tensor& dy, const Tensor& mean, const Tensor& rstd, const Tensor& x,
                           const Tensor& gamma, const Tensor& beta, std::int64_t groups, const std::string&,
                           double swish, bool gamma_wanted, bool beta_wanted, const Out& dx, const OptionalOut& dgamma,
                           const OptionalOut& dbeta) {
    const auto scale = rstd.unsqueeze(-1);
    const auto unit = (in_groups(x, groups) - mean.unsqueeze(-1)) * scale;
    const auto normal = unit.view(x.sizes());
    const auto z = normal * by_channel(gamma, x) + by_channel(beta, x);
    const auto s = at::sigmoid(z * swish);
    const auto dz = dy * s * (1 + z * swish * (1 - s));
    dx = through_norm(in_groups(dz * by_channel(gamma, x), groups), unit, scale, {-1}).view(x.sizes());
    if (gamma_wanted && dgamma) *dgamma = (dz * normal).transpose(0, 1).flatten(1).sum(1);
    if (beta_wanted && dbeta) *dbeta = dz.transpose(0, 1).flatten(1).sum(1);
}
const Formula<"aclnnGroupNormSwishGrad", group_norm_swish_grad> swish_of_group_norm_backward{
    {"dy", kFloats, "N C ...x"},    {"mean", kFloats},           {"rstd", kFloats},
    {"x", kFloats, "N C ...x"},     {"gamma", kFloats, "C"},     {"beta", kFloats, "C"},
    {"dxOut", kFloats, "N C ...x"}, {"dgammaOut", kFloats, "C"}, {"dbetaOut", kFloats, "C"},
};

}  // namespace
}  // namespace host_npu
