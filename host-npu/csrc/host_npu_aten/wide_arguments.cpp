#include "host_npu_aten/wide_arguments.h"

#include <algorithm>
#include <string_view>

#include "opapi/chip.h"

namespace host_npu {

namespace {

// The name without the namespace and the in-place suffix.
std::string_view base_name(std::string_view name) {
    name.remove_prefix(std::string_view("aten::").size());
    if (name.ends_with('_')) name.remove_suffix(1);
    return name;
}

}  // namespace

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
    return std::ranges::find(names, base_name(name)) != std::end(names);
}

namespace {

// Operators that have 16-bit kernels in CANN, but not on the CPU.
bool has_wide_kernels_only(std::string_view name) {
    static constexpr std::string_view names[] = {
        "_cdist_backward",
        "_cdist_forward",
        "_upsample_bicubic2d_aa",
        "_upsample_bicubic2d_aa_backward",
        "_upsample_bilinear2d_aa",
        "_upsample_bilinear2d_aa_backward",
        "avg_pool3d",
        "avg_pool3d_backward",
        "linalg_inv_ex",
        "multilabel_margin_loss_backward",
        "multilabel_margin_loss_forward",
        "rrelu_with_noise",
        "rrelu_with_noise_backward",
    };
    return std::ranges::find(names, base_name(name)) != std::end(names);
}

// The CPU's 16-bit kernels round after each number; CANN's do not.
bool accumulates(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue*> arguments) {
    const auto name = base_name(op.operator_name().name);
    if (name == "prod" || name == "histc" || name == "index_add") return true;
    if (name != "index_put" && name != "_index_put_impl" && name != "_unsafe_index_put") return false;
    return arguments[*op.schema().argumentIndexWithName("accumulate")]->toBool();
}

// The CPU's 16-bit kernels also compute sample positions in 16 bits, and read outside the image.
bool samples_a_grid(std::string_view name) {
    return name.starts_with("aten::grid_sampler_") || name.starts_with("aten::_grid_sampler_");
}

// The dtype in which an operator computes integers if the CPU supports it for floating-point numbers only.
std::optional<at::ScalarType> dtype_of_integers(std::string_view name) {
    if (base_name(name) == "histc") return at::kDouble;
    return base_name(name) == "hardsigmoid" ? std::optional(at::kFloat) : std::nullopt;
}

// The index of an argument whose indices are narrower than the CPU's 64 bits, if any.
std::optional<int> narrow_indices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue*> arguments) {
    const std::string_view name = base_name(op.operator_name().name);
    const auto is_loss = name.starts_with("nll_loss") || name.starts_with("multilabel_margin_loss");
    const auto is_pool = name.starts_with("max_pool") || name.starts_with("max_unpool");
    if (!is_loss && !is_pool && name != "put") return std::nullopt;
    const auto index = op.schema().argumentIndexWithName(is_loss ? "target" : is_pool ? "indices" : "index");
    if (!index || !arguments[*index]->isTensor()) return std::nullopt;
    const auto dtype = arguments[*index]->toTensor().scalar_type();
    return dtype == at::kInt || (is_loss && dtype == at::kByte) ? index : std::nullopt;
}

std::vector<at::Tensor> defined_tensors(c10::ArrayRef<c10::IValue*> arguments) {
    std::vector<at::Tensor> found;
    for (const auto* const argument : arguments) {
        if (argument->isTensor()) found.push_back(argument->toTensor());
        if (argument->isTensorList()) std::ranges::copy(argument->toTensorVector(), std::back_inserter(found));
    }
    std::erase_if(found, [](const auto& tensor) { return !tensor.defined(); });
    return found;
}

}  // namespace

std::optional<std::vector<std::int64_t>> shape_of_product(const c10::OperatorHandle& op,
                                                          c10::ArrayRef<c10::IValue*> arguments) {
    const auto& [name, overload] = op.operator_name();
    const bool has_addend = name == "aten::addmm" || name == "aten::baddbmm";
    const std::int64_t dim = name == "aten::bmm" || name == "aten::baddbmm" ? 3 : 2;
    if (!overload.empty() || (name != "aten::mm" && name != "aten::bmm" && !has_addend)) return std::nullopt;
    const auto& left = arguments[has_addend ? 1 : 0]->toTensor();
    const auto& right = arguments[has_addend ? 2 : 1]->toTensor();
    const auto& first = arguments[0]->toTensor();
    const auto is_plain = [&](const at::Tensor& tensor) {
        return tensor.layout() == at::kStrided && tensor.scalar_type() == left.scalar_type();
    };
    if (!is_plain(left) || !is_plain(right) || !is_plain(first)) return std::nullopt;
    if (left.dim() != dim || right.dim() != dim || left.size(-1) != right.size(-2)) return std::nullopt;
    if (dim == 2) return std::vector{left.size(0), right.size(1)};
    if (left.size(0) != right.size(0)) return std::nullopt;
    return std::vector{left.size(0), left.size(1), right.size(2)};
}

bool has_narrow_indices(const c10::OperatorHandle& op) {
    const auto& [name, overload] = op.operator_name();
    if (!overload.empty()) return false;
    return name == "aten::max_pool3d_with_indices" ? has_bfloat16()
                                                   : name == "aten::max_pool2d_with_indices" && soc() == Soc::Ascend950;
}

bool has_16_bits(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

WideArguments::WideArguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue*> arguments) {
    const auto& name = op.operator_name().name;
    const auto replace = [&](std::size_t index, const at::Tensor& wide) {
        const auto* const alias = op.schema().arguments()[index].alias_info();
        if (alias != nullptr && alias->isWrite()) written_.push_back({arguments[index]->toTensor(), wide});
        *arguments[index] = wide;
    };
    if (const auto index = narrow_indices(op, arguments)) replace(*index, arguments[*index]->toTensor().to(at::kLong));
    const auto of_integers = dtype_of_integers(name);
    if (!of_integers && !multiplies_matrices(name) && !samples_a_grid(name) && !has_wide_kernels_only(name) &&
        !accumulates(op, arguments))
        return;
    auto tensors = defined_tensors(arguments);
    if (!of_integers) std::erase_if(tensors, [](const auto& tensor) { return !tensor.is_floating_point(); });
    const auto is_like_first = [&](const auto& tensor) { return tensor.scalar_type() == tensors[0].scalar_type(); };
    if (tensors.empty() || !std::ranges::all_of(tensors, is_like_first)) return;
    const auto dtype = tensors[0].scalar_type();
    const bool are_integers = at::isIntegralType(dtype, false);
    if (are_integers ? !of_integers : !has_16_bits(tensors[0])) return;
    if (const auto index = op.schema().argumentIndexWithName("dtype")) {  // of prod
        if (!arguments[*index]->isNone() && arguments[*index]->toScalarType() != dtype) return;
        *arguments[*index] = c10::IValue();
    }
    narrow_ = dtype;
    wide_ = are_integers ? *of_integers : at::kFloat;
    const auto widened = [&](const at::Tensor& tensor) {
        return tensor.defined() && tensor.scalar_type() == narrow_ ? tensor.to(wide_) : tensor;
    };
    for (std::size_t index = 0; index < arguments.size(); ++index) {
        auto& argument = *arguments[index];
        if (argument.isTensor()) {
            replace(index, widened(argument.toTensor()));
        } else if (dtype == at::kHalf && argument.isDouble() && base_name(name) == "histc") {
            argument = static_cast<double>(at::Half(static_cast<float>(argument.toDouble())));  // an edge
        } else if (argument.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const auto& tensor : argument.toTensorVector()) list.push_back(widened(tensor));
            argument = list;
        }
    }
    if (base_name(name) == "_cdist_backward") {  // uses the largest difference, which was rounded
        *arguments[4] =
            at::_cdist_forward(arguments[1]->toTensor(), arguments[2]->toTensor(), arguments[3]->toDouble(), {});
    }
}

void WideArguments::round_written() const {
    for (const auto& [narrow, wide] : written_) {
        if (narrow.sizes() != wide.sizes()) narrow.resize_(wide.sizes());
        narrow.copy_(wide);
    }
}

void WideArguments::round_result(c10::IValue& result, const at::Tensor& out) const {
    if (!result.isTensor()) return;
    const auto tensor = result.toTensor();
    if (out.defined() && are_wide()) {
        out.copy_(tensor);
        result = out;
        return;
    }
    const auto written = std::ranges::find_if(written_, [&](const auto& pair) { return pair.wide.is_same(tensor); });
    if (written != written_.end()) {
        result = written->narrow;
    } else if (are_wide() && tensor.defined() && tensor.scalar_type() == wide_) {
        result = tensor.to(narrow_);
    }
}

}  // namespace host_npu
