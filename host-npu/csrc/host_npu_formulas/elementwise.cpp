// PyTorch's operators under their names in CANN, for programs that call CANN directly. torch_npu's calls of these
// operators are computed by host_npu_aten/ instead.
#include <cmath>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

template <Tensor (*function)(const Tensor&)>
void unary(const AnyTensor& x, const Out& out) {
    out = function(x);
}
const Formula<"aclnnAbs", unary<at::abs>> absolute;
const Formula<"aclnnCeil", unary<at::ceil>> ceiling;
const Formula<"aclnnCos", unary<at::cos>> cosine;
const Formula<"aclnnErf", unary<at::erf>> error_function;
const Formula<"aclnnExp", unary<at::exp>> exponential;
const Formula<"aclnnFloor", unary<at::floor>> floor_of;
const Formula<"aclnnLog", unary<at::log>> logarithm;
const Formula<"aclnnNeg", unary<at::neg>> negative;
const Formula<"aclnnReciprocal", unary<at::reciprocal>> inverse;
const Formula<"aclnnRelu", unary<at::relu>> relu;
const Formula<"aclnnRsqrt", unary<at::rsqrt>> inverse_root;
const Formula<"aclnnSigmoid", unary<at::sigmoid>> sigmoid;
const Formula<"aclnnSilu", unary<at::silu>> silu;
const Formula<"aclnnSin", unary<at::sin>> sine;
const Formula<"aclnnSqrt", unary<at::sqrt>> root;
const Formula<"aclnnTanh", unary<at::tanh>> tangent;

template <Tensor (*function)(const Tensor&, const Tensor&)>
void binary(const AnyTensor& x, const AnyTensor& y, const Out& out) {
    out = function(x, y);
}
const Formula<"aclnnMul", binary<at::mul>> product;
const Formula<"aclnnDiv", binary<at::div>> quotient;
const Formula<"aclnnMaximum", binary<at::maximum>> larger;
const Formula<"aclnnMinimum", binary<at::minimum>> smaller;
const Formula<"aclnnPowTensorTensor", binary<at::pow>> power;
// Takes the gradient and the result of the forward pass.
const Formula<"aclnnSigmoidBackward", binary<at::sigmoid_backward>> sigmoid_derivative;
const Formula<"aclnnTanhBackward", binary<at::tanh_backward>> tangent_derivative;
// Takes the gradient and the input of the forward pass.
const Formula<"aclnnSiluBackward", binary<at::silu_backward>> silu_derivative;

// The first version of CANN's GELU is the tanh approximation.
void plain_gelu(const Tensor& x, const Out& out) { out = at::gelu(x, "tanh"); }
const Formula<"aclnnGelu", plain_gelu> gelu_of{{"self", kFloats, "...x"}, {"out", as("self"), "...x"}};

void plain_gelu_grad(const Tensor& grad, const Tensor& x, const Out& out) { out = at::gelu_backward(grad, x, "tanh"); }
const Formula<"aclnnGeluBackward", plain_gelu_grad> gelu_derivative{
    {"gradOutput", kFloats}, {"self", kFloats}, {"gradInput", kFloats}};

// Converts a number to an integer for integer tensors, so that the result stays an integer.
at::Scalar number_for(const Tensor& x, const Number& number) {
    if (!x.is_floating_point() && number.value == std::floor(number.value)) {
        return at::Scalar(static_cast<std::int64_t>(number.value));
    }
    return at::Scalar(number.value);
}

void add(const AnyTensor& x, const AnyTensor& y, const Number& alpha, const Out& out) {
    out = at::add(x, y, number_for(y, alpha));
}
const Formula<"aclnnAdd", add> sum_of_two;

void subtract(const AnyTensor& x, const AnyTensor& y, const Number& alpha, const Out& out) {
    out = at::sub(x, y, number_for(y, alpha));
}
const Formula<"aclnnSub", subtract> difference;

void add_number(const AnyTensor& x, const Number& y, const Number& alpha, const Out& out) {
    out = at::add(x, number_for(x, {y.value * alpha.value}));
}
const Formula<"aclnnAdds", add_number> sum_with_number;

void subtract_number(const AnyTensor& x, const Number& y, const Number& alpha, const Out& out) {
    out = at::sub(x, number_for(x, {y.value * alpha.value}));
}
const Formula<"aclnnSubs", subtract_number> difference_from_number;

void multiply_number(const AnyTensor& x, const Number& y, const Out& out) { out = at::mul(x, number_for(x, y)); }
const Formula<"aclnnMuls", multiply_number> product_with_number;

void divide_number(const AnyTensor& x, const Number& y, const Out& out) { out = at::div(x, number_for(x, y)); }
const Formula<"aclnnDivs", divide_number> quotient_by_number;

void power_of_number(const AnyTensor& x, const Number& y, const Out& out) { out = at::pow(x, number_for(x, y)); }
const Formula<"aclnnPowTensorScalar", power_of_number> power_by_number;

void clamp(const AnyTensor& x, const Number& least, const Number& most, const Out& out) {
    out = at::clamp(x, number_for(x, least), number_for(x, most));
}
const Formula<"aclnnClamp", clamp> between;

void choose(const IntegerTensor& condition, const AnyTensor& x, const AnyTensor& y, const Out& out) {
    out = at::where(condition.to(at::kBool), x, y);
}
const Formula<"aclnnSWhere", choose> one_of_two;

// Used by torch_npu itself: pads tensors to multiples of 32 bytes for a collective, and copies conjugate views.
constexpr Dtypes kPadded = kFloats | Dtypes{ACL_DOUBLE, ACL_INT8, ACL_INT16,     ACL_INT32,     ACL_INT64,
                                            ACL_UINT8,  ACL_BOOL, ACL_COMPLEX64, ACL_COMPLEX128};
void pad_with(const AnyTensor& x, const std::vector<std::int64_t>& elements, const Number& value, const Out& out) {
    out = at::constant_pad_nd(x, elements, value.value);
}
const Formula<"aclnnConstantPadNd", pad_with> with_padding{{"self", kPadded}, {"out", as("self")}};

void join_parts(const AnyTensor& real, const AnyTensor& imag, const Out& out) { out = at::complex(real, imag); }
const Formula<"aclnnComplex", join_parts> complex_of_parts{
    TensorRules{{"real", {ACL_FLOAT, ACL_DOUBLE}}, {"imag", as("real")}, {"out", {ACL_COMPLEX64, ACL_COMPLEX128}}},
    Together{{"real", "out"}, {{ACL_FLOAT, ACL_COMPLEX64}, {ACL_DOUBLE, ACL_COMPLEX128}}}};

}  // namespace
}  // namespace host_npu
