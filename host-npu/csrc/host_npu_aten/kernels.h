// Kernels of operators for which PyTorch's CPU kernel is unsuitable, written with other operators.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <tuple>

namespace host_npu {

// aten::_efficientzerotensor, but with memory, because torch_npu's kernels read it.
at::Tensor zero_tensor(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin_memory);

// aten::div_.Scalar, which Python's div_ does not call. For integers, it returns the float32 quotient without its
// fraction, like aclnnInplaceDivs, with which torch_npu's process group averages a sum.
at::Tensor& divide_by_number(at::Tensor& self, const at::Scalar& number);

// aten::native_dropout and aten::randperm, written with operators that take a generator: without one, a kernel uses the
// CPU's default generator, which other threads may use at the same time.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train);
at::Tensor permutation(c10::SymInt n, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin_memory);
at::Tensor& permutation_out(c10::SymInt n, at::Tensor& out);

// aten::one_hot. Like torch_npu's, it also takes 32-bit indices and keeps their dtype.
at::Tensor one_hot(const at::Tensor& indices, int64_t num_classes);

// aten::_thnn_fused_lstm_cell, written with differentiable operators, so that it needs no workspace.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias);

// aten::_thnn_fused_gru_cell, likewise.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias);

// aten::lstm.data for the torch.nn.LSTM of torch_npu 2.9, which puts the batch sizes on the device and, because its
// kernel returns an unpacked output, joins the first two dimensions of the output.
std::tuple<at::Tensor, at::Tensor, at::Tensor> packed_lstm(const at::Tensor& data, const at::Tensor& batch_sizes,
                                                           at::TensorList hx, at::TensorList params, bool has_biases,
                                                           int64_t num_layers, double dropout, bool train,
                                                           bool bidirectional);

}  // namespace host_npu
