#include "host_npu_aten/operators.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "host_npu_aten/wide_arguments.h"
#include "opapi/native_kernels.h"

namespace host_npu {
namespace {

using c10::DispatchKey;

// Whether the operator has its own kernel in kernels.cpp or fallback.cpp.
bool has_own_kernel(const c10::OperatorName& op) {
    const auto& overload = op.overload_name;
    return op.name == "aten::_efficientzerotensor" || op.name == "aten::one_hot" ||
           (op.name == "aten::div_" && overload == "Scalar") ||
           ((op.name == "aten::native_dropout" || op.name == "aten::native_dropout_backward") && overload.empty()) ||
           (op.name == "aten::randperm" && (overload.empty() || overload == "out"));
}

// Operators whose torch_npu kernels are kept: they create tensors, define aliasing, or move data between devices.
const std::unordered_set<std::string>& kernels_of_memory() {
    static const std::unordered_set<std::string> names = {
        "aten::copy_",
        "aten::_copy_from",
        "aten::_copy_from_and_resize",
        "aten::_to_copy",
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::to",
        "aten::_pin_memory",
        "aten::is_pinned",
        "aten::record_stream",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::_empty_affine_quantized",
        "aten::clone",
        "aten::contiguous",
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::_resize_output_",
        "aten::as_strided_",
        "aten::squeeze_",
        "aten::unsqueeze_",
        "aten::transpose_",
        "aten::t_",
        "aten::swapaxes_",
        "aten::swapdims_",
        "aten::detach_",
        "aten::_unsafe_view",
        "aten::_reshape_alias",
        "aten::_lazy_clone",
        "aten::reshape",
        "aten::lift",
        "aten::lift_fresh",
        "aten::is_set_to",
        "aten::_has_compatible_shallow_copy_type",
        "aten::_fused_sdp_choice",
        "aten::scaled_dot_product_attention",
    };
    return names;
}

// Whether torch_npu's kernel is kept.
bool is_native(const std::string& name) {
    return kernels_of_memory().contains(name) || std::ranges::find(native_kernels(), name) != native_kernels().end();
}

// Whether the host NPU may replace torch_npu's kernels.
bool is_replaceable(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name().name;
    return name.starts_with("aten::") && op.hasSchema() && !is_native(name) && !has_own_kernel(op.operator_name());
}

// Whether a result is a view that aliases an argument without writing to it.
bool returns_view(const c10::FunctionSchema& schema) {
    return std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
        return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
}

bool has_composite_kernel(const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
           op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
           op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Whether the operator is a composite on the CPU, which also defines its derivative; an NPU kernel would hide the
// derivative. Operators that also have a kernel and a derivative of their own on the CPU, such as silu_backward, do not
// count.
bool is_composite_on_host(const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
           !(op.hasKernelForDispatchKey(DispatchKey::CPU) && op.hasKernelForDispatchKey(DispatchKey::Autograd));
}

bool has_kernel_of_torch_npu(const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
           op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1);
}

// Depending on its version, torch_npu has a kernel with or without a derivative for these.
bool is_replaced_composite(const c10::OperatorHandle& op) {
    return is_composite_on_host(op) && has_kernel_of_torch_npu(op);
}

// Composites that call other operators on an NPU than on the CPU: one operator per tensor of a list, or a kernel that
// an NPU does not have.
bool chooses_by_device(const std::string& name) {
    return name == "aten::convolution" || name == "aten::convolution_backward" || name == "aten::conj_physical_" ||
           name.starts_with("aten::_foreach_");
}

}  // namespace

bool is_composed(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name();
    if (!is_replaceable(op)) return false;
    // Some of its results are CPU tensors.
    if (name.name == "aten::_pack_padded_sequence" && name.overload_name.empty()) return true;
    // It also copies between devices.
    if (name.name == "aten::_foreach_copy_") return true;
    return is_replaced_composite(op) && !multiplies_matrices(name.name);
}

void require_native_kernels() {
    std::unordered_set<std::string> missing(native_kernels().begin(), native_kernels().end());
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findOp(name);
        if (op && op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) missing.erase(name.name);
    }
    TORCH_CHECK(missing.empty(), "libopapi.so names the native kernel of ", *missing.begin(),
                ", but torch_npu has no kernel of this name");
}

bool falls_back(const c10::OperatorHandle& op) {
    if (!is_replaceable(op) || is_composed(op) || returns_view(op.schema())) return false;
    // Without autograd, a composite of several products, such as an LSTM, is rounded once as a whole.
    if (is_composite_on_host(op)) return has_kernel_of_torch_npu(op);
    if (op.hasKernelForDispatchKey(DispatchKey::CPU) || chooses_by_device(op.operator_name().name)) return true;
    // Other composites work on both devices, unless torch_npu replaces them.
    return has_composite_kernel(op) && op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
}

bool is_derived_by_pytorch(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name().name;
    // PyTorch's derivative fills float64 by a mask, which a device refuses.
    if (name == "aten::renorm" || name == "aten::renorm_") return false;
    const bool is_replaced =
        op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1) || is_composed(op) || is_replaced_composite(op);
    return is_replaceable(op) && is_replaced &&
           (op.hasKernelForDispatchKey(DispatchKey::CPU) || has_composite_kernel(op));
}

bool may_be_on_host(const c10::OperatorHandle& op, const c10::Argument& argument) {
    // Indices, lengths and batch sizes, which may be CPU tensors on PyTorch's other devices, too.
    static constexpr std::pair<std::string_view, std::string_view> arguments[] = {
        {"aten::index", "indices"},
        {"aten::_index_put_impl", "indices"},
        {"aten::_unsafe_index", "indices"},
        {"aten::ctc_loss", "targets"},
        {"aten::_ctc_loss", "targets"},
        {"", "lengths"},
        {"", "batch_sizes"},
        {"", "input_lengths"},
        {"", "target_lengths"},
        {"", "tensor_indices_or_sections"},
    };
    const std::string_view name = op.operator_name().name;
    return std::ranges::any_of(arguments, [&](const auto& allowed) {
        return name.starts_with(allowed.first) && argument.name() == allowed.second;
    });
}

}  // namespace host_npu
