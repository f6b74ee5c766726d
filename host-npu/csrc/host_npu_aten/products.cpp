#include "host_npu_aten/products.h"

#include <algorithm>
#include <string_view>

namespace host_npu {

// Under these names stand their variants for a given output and in place, too.
bool multiplies_matrices(std::string_view name) {
    static constexpr std::string_view names[] = {
        "mm",
        "addmm",
        "_addmm_activation",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "matmul",
        "linear",
        "conv_tbc",
        "convolution",
        "_convolution",
        "convolution_backward",
        "gru",
        "lstm",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    };
    name.remove_prefix(std::string_view("aten::").size());
    if (name.ends_with('_')) name.remove_suffix(1);
    return std::ranges::find(names, name) != std::end(names);
}

namespace {

std::vector<at::Tensor> floating_tensors(c10::ArrayRef<c10::IValue*> arguments) {
    std::vector<at::Tensor> found;
    for (const auto* const argument : arguments) {
        if (argument->isTensor()) found.push_back(argument->toTensor());
        if (argument->isTensorList()) std::ranges::copy(argument->toTensorVector(), std::back_inserter(found));
    }
    std::erase_if(found, [](const auto& tensor) { return !tensor.defined() || !tensor.is_floating_point(); });
    return found;
}

at::Tensor widened(const at::Tensor& tensor) {
    return tensor.defined() && has_16_bits(tensor) ? tensor.to(at::kFloat) : tensor;
}

}  // namespace

bool has_16_bits(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

WideArguments::WideArguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue*> arguments) {
    if (!multiplies_matrices(op.operator_name().name)) return;
    const auto tensors = floating_tensors(arguments);
    const auto is_like_first = [&](const auto& tensor) { return tensor.scalar_type() == tensors[0].scalar_type(); };
    if (tensors.empty() || !has_16_bits(tensors[0]) || !std::ranges::all_of(tensors, is_like_first)) return;
    dtype_ = tensors[0].scalar_type();
    for (std::size_t index = 0; index < arguments.size(); ++index) {
        auto& argument = *arguments[index];
        const auto* const alias = op.schema().arguments()[index].alias_info();
        if (argument.isTensor()) {
            const auto narrow = argument.toTensor();
            argument = widened(narrow);
            if (alias != nullptr && alias->isWrite()) written_.push_back({narrow, argument.toTensor()});
        } else if (argument.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const auto& tensor : argument.toTensorVector()) list.push_back(widened(tensor));
            argument = list;
        }
    }
}

void WideArguments::round_written() const {
    for (const auto& [narrow, wide] : written_) {
        if (narrow.sizes() != wide.sizes()) narrow.resize_(wide.sizes());
        narrow.copy_(wide);
    }
}

void WideArguments::round_result(c10::IValue& result) const {
    if (dtype_ == at::kFloat || !result.isTensor()) return;
    const auto tensor = result.toTensor();
    const auto written = std::ranges::find_if(written_, [&](const auto& pair) { return pair.wide.is_same(tensor); });
    if (written != written_.end()) {
        result = written->narrow;
    } else if (tensor.defined() && tensor.scalar_type() == at::kFloat) {
        result = tensor.to(dtype_);
    }
}

}  // namespace host_npu
