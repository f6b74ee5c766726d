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

// They have kernels of their own, in kernels.cpp or fallback.cpp.
bool has_own_kernel(const c10::OperatorName& op) {
    const auto& overload = op.overload_name;
    return op.name == "aten::_efficientzerotensor" || op.name == "aten::one_hot" ||
           (op.name == "aten::div_" && overload == "Scalar") ||
           ((op.name == "aten::native_dropout" || op.name == "aten::native_dropout_backward") && overload.empty()) ||
           (op.name == "aten::randperm" && (overload.empty() || overload == "out"));
}

// torch_npu's own kernels that make tensors, say what shares memory with what, or move data between devices.
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

// Whether torch_npu's own kernel stays.
bool is_native(const std::string& name) {
    return kernels_of_memory().contains(name) || std::ranges::find(native_kernels(), name) != native_kernels().end();
}

// Whether the host NPU may put kernels in the place of torch_npu's.
bool is_replaceable(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name().name;
    return name.starts_with("aten::") && op.hasSchema() && !is_native(name) && !has_own_kernel(op.operator_name());
}

// Whether a result is a view, which shares memory with an argument and does not change it.
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

// Whether the CPU runs the operator as the operators that it is made of, which also gives its derivative. A kernel for
// an NPU would hide that derivative. Operators that have a composite, but a kernel and a derivative of their own on the
// CPU, such as silu_backward, are none.
bool is_composite_on_host(const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
           !(op.hasKernelForDispatchKey(DispatchKey::CPU) && op.hasKernelForDispatchKey(DispatchKey::Autograd));
}

bool has_kernel_of_torch_npu(const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
           op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1);
}

// Some versions of torch_npu have a kernel with a derivative for them, some one without.
bool is_replaced_composite(const c10::OperatorHandle& op) {
    return is_composite_on_host(op) && has_kernel_of_torch_npu(op);
}

// Composites that call other operators for an NPU than for the CPU, one operator for each tensor of a list, or a kernel
// that an NPU does not have.
bool chooses_by_device(const std::string& name) {
    return name == "aten::convolution" || name == "aten::convolution_backward" || name == "aten::conj_physical_" ||
           name.starts_with("aten::_foreach_");
}

}  // namespace

bool is_composed(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name();
    if (!is_replaceable(op)) return false;
    // Some results of this one are the host's.
    if (name.name == "aten::_pack_padded_sequence" && name.overload_name.empty()) return true;
    // It copies between devices, too.
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
    // Without autograd a composite of several products, such as an LSTM, is rounded once as a whole.
    if (is_composite_on_host(op)) return has_kernel_of_torch_npu(op);
    if (op.hasKernelForDispatchKey(DispatchKey::CPU) || chooses_by_device(op.operator_name().name)) return true;
    // Other composites serve both devices alike, unless torch_npu replaces them.
    return has_composite_kernel(op) && op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
}

bool is_derived_by_pytorch(const c10::OperatorHandle& op) {
    const bool is_replaced =
        op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1) || is_composed(op) || is_replaced_composite(op);
    return is_replaceable(op) && is_replaced &&
           (op.hasKernelForDispatchKey(DispatchKey::CPU) || has_composite_kernel(op));
}

bool may_be_on_host(const c10::OperatorHandle& op, const c10::Argument& argument) {
    // Indices, lengths and batch sizes, which PyTorch's other devices take from the host too.
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
