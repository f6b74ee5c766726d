#include "host_npu_aten/kernels.h"

#include <utility>

#include "host_npu_aten/documented_dtypes.h"

namespace host_npu {
namespace {

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

}  // namespace

at::Tensor zero_tensor(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin_memory) {
    return at::zeros_symint(size, dtype, layout, device, pin_memory);
}

at::Tensor& divide_by_number(at::Tensor& self, const at::Scalar& number) {
    if (!at::isIntegralType(self.scalar_type(), true)) return self.div_(at::native::wrapped_scalar_tensor(number));
    return self.copy_(self.to(at::kFloat).div(number).trunc());
}

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
    const auto mask_options = input.options().dtype(at::kBool);
    if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, mask_options)};
    if (p > 0 && p < 1) refuse_undocumented_dtype("aten::native_dropout", input.scalar_type());
    const auto mask = at::empty_like(input, mask_options, at::MemoryFormat::Contiguous);
    mask.bernoulli_(1 - p);
    return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

at::Tensor permutation(c10::SymInt n, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin_memory) {
    return at::randperm_symint(std::move(n), std::nullopt, dtype, layout, device, pin_memory);
}

at::Tensor& permutation_out(c10::SymInt n, at::Tensor& out) {
    return at::randperm_symint_out(out, std::move(n), std::nullopt);
}

at::Tensor one_hot(const at::Tensor& indices, int64_t num_classes) {
    if (indices.scalar_type() != at::kInt) return at::native::one_hot(indices, num_classes);
    return at::native::one_hot(indices.to(at::kLong), num_classes).to(at::kInt);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
    const auto gates = with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
    const auto parts = gates.chunk(4, 1);
    const auto next_cell = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
    return {parts[3].sigmoid() * next_cell.tanh(), next_cell, at::empty({0}, cell.options())};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
    const auto inputs = with_bias(input_gates, input_bias).chunk(3, 1);
    const auto states = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    const auto reset = (states[0] + inputs[0]).sigmoid();
    const auto update = (states[1] + inputs[1]).sigmoid();
    const auto candidate = (inputs[2] + states[2] * reset).tanh();
    return {(hidden - candidate) * update + candidate, at::empty({0}, hidden.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> packed_lstm(const at::Tensor& data, const at::Tensor& batch_sizes,
                                                           at::TensorList hx, at::TensorList params, bool has_biases,
                                                           int64_t num_layers, double dropout, bool train,
                                                           bool bidirectional) {
    auto [output, hidden, cell] =
        at::native::lstm(data, batch_sizes.cpu(), hx, params, has_biases, num_layers, dropout, train, bidirectional);
    return {batch_sizes.is_cpu() ? output : output.unsqueeze(1), hidden, cell};
}

}  // namespace host_npu
