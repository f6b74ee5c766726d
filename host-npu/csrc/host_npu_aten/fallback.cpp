// Runs CPU kernels of aten operators on NPU tensors, in device memory. Loading the library registers them; load it
// after torch_npu, whose kernels they replace.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <torch/library.h>
#include <torch/version.h>
#include <torch_npu/csrc/aten/CustomFunctions.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "ascendcl/device.h"
#include "host_npu_aten/captured_call.h"
#include "host_npu_aten/documented_dtypes.h"
#include "host_npu_aten/drain.h"
#include "host_npu_aten/host_call.h"
#include "host_npu_aten/kernels.h"
#include "host_npu_aten/operators.h"
#include "host_npu_aten/random.h"
#include "host_npu_aten/refusals.h"
#include "host_npu_aten/views.h"
#include "host_npu_aten/wide_arguments.h"

namespace host_npu {
namespace {

using torch::jit::Stack;

c10::IValue on_host(const c10::IValue& value, bool may_be_on_host, bool is_written, Views& views) {
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
        auto device = value.toDevice();
        if (!device.has_index()) device = c10::impl::getDeviceGuardImpl(device.type())->getDevice();
        views.set_device(device);
        return c10::Device(c10::kCPU);
    }
    return with_tensors(value,
                        [&](const at::Tensor& tensor) { return views.view(tensor, may_be_on_host, is_written); });
}

// Whether the result has the shape and dtype of the first argument; all tensors are float32 and of that shape.
bool is_like_first(const c10::OperatorHandle& op, Arguments arguments) {
    static constexpr std::string_view names[] = {
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::_softmax_backward_data",
        "aten::_log_softmax_backward_data",
        "aten::add.Tensor",
        "aten::div.Tensor",
        "aten::gelu",
        "aten::mul.Tensor",
        "aten::sub.Tensor",
    };
    if (std::ranges::find(names, c10::toString(op.operator_name())) == std::end(names)) return false;
    return std::ranges::all_of(arguments, [&](const c10::IValue* argument) {
        if (!argument->isTensor()) return true;
        const auto& tensor = argument->toTensor();
        return tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
               tensor.sizes() == arguments[0]->toTensor().sizes();
    });
}

// Returns a CPU view of a new NPU tensor for the result, if shape and dtype are known in advance, so that kernels with
// large results write directly to device memory. Other results are copied.
at::Tensor result_in_device_memory(const c10::OperatorHandle& op, Arguments arguments, Views& views) {
    auto shape = shape_of_product(op, arguments);
    if (!shape && is_like_first(op, arguments)) shape = arguments[0]->toTensor().sizes().vec();
    if (!shape) return {};
    const auto options = arguments[0]->toTensor().options().device(*views.device());
    return views.view(at::empty(*shape, options), false, true);
}

// Whether the host also waits on a device, for a value or a shape that is computed there.
bool waits_on_device(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
    const std::string_view name = op.operator_name().name;
    const bool puts = name.starts_with("aten::index_put") || name == "aten::_index_put_impl_";
    if (!puts && name != "aten::index") {
        return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
    }
    if (puts && arguments[2].toTensor().is_cpu()) return false;  // fills a mask with a number
    return std::ranges::any_of(arguments[1].toOptionalTensorVector(), [](const std::optional<at::Tensor>& index) {
        return index && at::isIntegralType(index->scalar_type(), true) && index->element_size() == 1;
    });
}

void compute_on_host(const c10::OperatorHandle& op, Stack* stack) {
    refuse_undocumented_dtype(op, *stack);
    if (captures_are_under_way() && record_call(op, stack)) return;
    const auto& schema = op.schema();
    if (waits_on_device(op, torch::jit::last(*stack, schema.arguments().size()))) c10_npu::warn_or_error_on_sync();
    const auto begin = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
    Views views;
    std::vector<c10::IValue*> arguments;
    for (const auto& argument : schema.arguments()) {
        auto& value = begin[static_cast<std::ptrdiff_t>(arguments.size())];
        const auto* const alias = argument.alias_info();
        value = on_host(value, may_be_on_host(op, argument), alias != nullptr && alias->isWrite(), views);
        arguments.push_back(&value);
    }
    views.refuse_host_tensors();
    const auto& device = views.device();
    // Dispatched to the NPU because of the generator only.
    if (!device) take_generator(arguments, at::kCPU);
    TORCH_INTERNAL_ASSERT(device, op.operator_name(), " has no NPU argument");
    const c10::OptionalDeviceGuard guard(*device);
    const auto out = result_in_device_memory(op, arguments, views);
    drain(*device);
    const auto generator = take_generator(arguments, *device);
    std::optional<std::uint64_t> seed;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) seed = next_seed(generator, *device);
    call_on_host(op, arguments, stack, seed, out);
    views.write_back();
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size());
    for (auto result = first; result != stack->end(); ++result) {
        *result = with_tensors(*result, [&](const at::Tensor& tensor) { return views.result(tensor); });
    }
    views.copy_results();
}

// aten::native_dropout_backward. The mask of npu::_npu_dropout has one bit per element; the CPU kernel would multiply
// by its bytes or broadcast them.
void compute_gradient_of_dropout(const c10::OperatorHandle& op, Stack* stack) {
    const auto arguments = torch::jit::last(*stack, 3);
    if (arguments[1].toTensor().scalar_type() != at::kByte) {
        compute_on_host(op, stack);
        return;
    }
    const auto gradient = arguments[0].toTensor(), mask = arguments[1].toTensor();
    const auto scale = arguments[2].toDouble();
    torch::jit::drop(*stack, 3);
    if (scale == 0 || scale == 1) {
        torch::jit::push(*stack, scale == 0 ? at::zeros_like(gradient) : gradient.clone());
    } else {
        torch::jit::push(*stack, at_npu::native::custom_ops::npu_dropout_backward(gradient, mask, 1 - 1 / scale));
    }
}

struct IgnoreWarnings : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// Calls the kernel of CPU tensors that require a gradient: a derivative or composite, which dispatches its calls.
void derive_as_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    refuse_undocumented_dtype(op, *stack);
    op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradCPU).callBoxed(op, keys, stack);
}

// The same for tensors without an autograd key, such as inference tensors.
void compose_as_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    refuse_undocumented_dtype(op, *stack);
    op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU).callBoxed(op, keys, stack);
}

// Whether torch.nn.LSTM is replaced by torch_npu's, which calls lstm.data differently: in 2.9, but no longer in 2.12.
constexpr bool joins_packed_outputs() { return TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12; }

void register_kernels() {
    require_native_kernels();
    // Suppress PyTorch's warnings about replaced kernels.
    IgnoreWarnings ignore;
    const c10::WarningUtils::WarningHandlerGuard guard(&ignore);
    using torch::Library;
    static auto& kernels = *new Library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    static auto& autograd =
        *new Library(Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findSchema(name);
        if (!op) continue;
        const auto full_name = c10::toString(name);
        // Evaluated before the first registration changes the results.
        const bool derived = is_derived_by_pytorch(*op), composed = is_composed(*op);
        if (falls_back(*op)) {
            kernels.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
        }
        if (composed) {
            kernels.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compose_as_on_host>());
        }
        if (derived) {
            autograd.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&derive_as_on_host>());
        }
    }
    kernels.impl("_efficientzerotensor", TORCH_FN(zero_tensor));
    kernels.impl("div_.Scalar", TORCH_FN(divide_by_number));
    kernels.impl("native_dropout", TORCH_FN(dropout));
    kernels.impl("native_dropout_backward", torch::CppFunction::makeFromBoxedFunction<&compute_gradient_of_dropout>());
    kernels.impl("randperm", TORCH_FN(permutation));
    kernels.impl("randperm.out", TORCH_FN(permutation_out));
    register_refusals(kernels);
    for (auto* const library : {&kernels, &autograd}) {
        library->impl("one_hot", TORCH_FN(one_hot));
        library->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
        library->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
        if (joins_packed_outputs()) library->impl("lstm.data", TORCH_FN(packed_lstm));
    }
}

// Every result is allocated, copied to the device and freed. By default glibc returns such memory to the kernel each
// time, and fresh pages cost more than many operators.
void keep_freed_memory() {
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

const bool registered = [] {
    keep_freed_memory();
    register_kernels();
    return true;
}();

}  // namespace
}  // namespace host_npu
