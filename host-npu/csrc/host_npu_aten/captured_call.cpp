#include "host_npu_aten/captured_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ascendcl/device.h"
#include "host_npu_aten/host_call.h"
#include "host_npu_aten/operators.h"
#include "host_npu_aten/placed_tensor.h"
#include "host_npu_aten/random.h"
#include "host_npu_aten/views.h"

namespace host_npu {
namespace {

using torch::jit::Stack;

// A call that can be replayed on the memory that its tensors had when it was recorded.
class CapturedCall {
  public:
    // Takes the arguments of the NPU operator. Host tensors are copied.
    CapturedCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, c10::Device device);

    // Runs the kernel for the first time and returns the results as NPU tensors. `originals` are the tensors of the
    // arguments. Later runs write to the memory of newly created results.
    Stack rehearse(const std::vector<at::Tensor>& originals);
    void run() const;

  private:
    struct Outcome {
        // The CPU tensors of all arguments, and the kernel's results.
        std::vector<at::Tensor> arguments;
        Stack results;
    };
    // The destination of the `index`-th tensor of the arguments or results.
    struct Copy {
        std::size_t index;
        PlacedTensor target;
    };

    Outcome compute() const;
    void follow_resized(const Outcome& outcome, const std::vector<at::Tensor>& originals);
    at::Tensor result(const at::Tensor& on_host, std::size_t index, const Outcome& outcome,
                      const std::vector<at::Tensor>& originals);

    const c10::OperatorHandle op_;
    const c10::Device device_;
    Stack arguments_;
    // One entry for each tensor of the arguments, in order; nullopt for a host tensor.
    std::vector<std::optional<PlacedTensor>> tensors_;
    // For each tensor, the first index of the same tensor: a kernel must not resize an output that is also an input.
    std::vector<std::size_t> same_;
    std::optional<SeedOfReplay> seed_;
    std::vector<Copy> resized_;
    std::vector<Copy> results_;
};

std::string name_of(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }

// Returns the tensor without gaps between its elements, as the device allocates new results.
at::Tensor dense(const at::Tensor& tensor) {
    const auto plain = tensor.resolve_conj().resolve_neg();
    return plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
}

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
    std::vector<at::Tensor> all;
    for (const auto& value : values) {
        with_tensors(value, [&](const at::Tensor& tensor) { return all.emplace_back(tensor); });
    }
    return all;
}

// Copies the tensor, because the host may change it before a replay.
at::Tensor copy_on_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
}

CapturedCall::CapturedCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, c10::Device device)
    : op_(op), device_(device) {
    const auto originals = tensors_of(arguments);
    for (const auto& tensor : originals) {
        const auto is_it = [&](const at::Tensor& other) { return other.is_same(tensor); };
        same_.push_back(static_cast<std::size_t>(std::ranges::find_if(originals, is_it) - originals.begin()));
    }
    for (const auto& argument : arguments) {
        if (argument.isDevice() && argument.toDevice().is_privateuseone()) {
            arguments_.emplace_back(c10::Device(c10::kCPU));
            continue;
        }
        arguments_.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
            const bool is_on_device = tensor.defined() && tensor.is_privateuseone();
            tensors_.push_back(is_on_device ? std::optional<PlacedTensor>(tensor) : std::nullopt);
            return is_on_device ? at::Tensor() : copy_on_host(tensor);
        }));
    }
    std::vector<c10::IValue*> pointers;
    for (auto& argument : arguments_) pointers.push_back(&argument);
    const auto generator = take_generator(pointers, device);
    if (op.hasTag(at::Tag::nondeterministic_seeded)) seed_.emplace(generator, device);
}

CapturedCall::Outcome CapturedCall::compute() const {
    Outcome outcome;
    PlacedViews views;
    for (const auto& argument : arguments_) {
        outcome.results.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
            const auto index = outcome.arguments.size();
            const auto& placed = tensors_[index];
            const auto known = same_[index] < index ? outcome.arguments[same_[index]] : at::Tensor();
            return outcome.arguments.emplace_back(known.defined() ? known : placed ? views.view(*placed) : tensor);
        }));
    }
    std::vector<c10::IValue*> pointers;
    for (auto& argument : outcome.results) pointers.push_back(&argument);
    call_on_host(op_, pointers, &outcome.results, seed_ ? std::optional(seed_->value()) : std::nullopt);
    return outcome;
}

// Resizes the arguments whose views the kernel has resized.
void CapturedCall::follow_resized(const Outcome& outcome, const std::vector<at::Tensor>& originals) {
    for (std::size_t index = 0; index < tensors_.size(); ++index) {
        const auto& view = outcome.arguments[index];
        if (!tensors_[index] || same_[index] != index || still_matches(view, *tensors_[index])) continue;
        const bool moved = has_moved(view, *tensors_[index]);
        const auto source = dense(view);
        originals[index].resize_(source.sizes());
        if (source.strides() != originals[index].strides()) {
            originals[index].as_strided_(source.sizes(), source.strides());
        }
        if (moved) resized_.push_back({index, PlacedTensor(originals[index])});
    }
}

at::Tensor CapturedCall::result(const at::Tensor& on_host, std::size_t index, const Outcome& outcome,
                                const std::vector<at::Tensor>& originals) {
    if (!on_host.defined()) return on_host;
    for (std::size_t argument = 0; argument < tensors_.size(); ++argument) {
        const auto& view = outcome.arguments[argument];
        if (!tensors_[argument]) continue;
        if (view.is_same(on_host)) return originals[argument];
        if (!view.storage().is_alias_of(on_host.storage())) continue;
        return at::as_strided(originals[argument], on_host.sizes(), on_host.strides(), on_host.storage_offset());
    }
    const auto source = dense(on_host);
    const auto options = on_host.options().device(device_).pinned_memory(false);
    auto on_device = at::empty_strided(source.sizes(), source.strides(), options);
    results_.push_back({index, PlacedTensor(on_device)});
    return on_device;
}

Stack CapturedCall::rehearse(const std::vector<at::Tensor>& originals) {
    const auto outcome = compute();
    follow_resized(outcome, originals);
    Stack results;
    std::size_t index = 0;
    for (const auto& value : outcome.results) {
        results.push_back(with_tensors(value, [&](const at::Tensor& on_host) {
            TORCH_CHECK(!on_host.defined() || on_host.layout() == at::kStrided, "the host NPU does not capture ",
                        name_of(op_), ", because its result is sparse");
            return result(on_host, index++, outcome, originals);
        }));
    }
    // Waits for the copies that resizing has queued in torch_npu, before the new contents are written.
    c10_npu::getCurrentNPUStream(device_.index()).stream();
    const auto on_host = tensors_of(outcome.results);
    for (const auto& [argument, target] : resized_) copy_to(target, dense(outcome.arguments[argument]));
    for (const auto& [position, target] : results_) copy_to(target, dense(on_host[position]));
    return results;
}

void CapturedCall::run() const {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
        const auto outcome = compute();
        const auto on_host = tensors_of(outcome.results);
        for (const auto& [argument, target] : resized_) copy_to(target, dense(outcome.arguments[argument]));
        for (const auto& [position, target] : results_) copy_to(target, dense(on_host[position]));
    } catch (const c10::Error& error) {
        throw std::runtime_error(error.what_without_backtrace());
    }
}

std::optional<c10::Device> device_of(c10::ArrayRef<c10::IValue> arguments) {
    std::optional<c10::Device> device;
    for (const auto& argument : arguments) {
        if (argument.isDevice() && argument.toDevice().is_privateuseone()) device = argument.toDevice();
        for (const auto& tensor : tensors_of(argument)) {
            if (tensor.defined() && tensor.is_privateuseone()) return tensor.device();
        }
    }
    if (device && !device->has_index()) device = c10::impl::getDeviceGuardImpl(device->type())->getDevice();
    return device;
}

bool returns_tensors(const c10::OperatorHandle& op) {
    return std::ranges::all_of(op.schema().returns(), [](const c10::Argument& result) {
        const auto kind = result.type()->kind();
        return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    });
}

// Whether the result is a host number that depends on shapes only.
bool returns_choice(const c10::OperatorHandle& op) { return op.operator_name().name == "aten::_fused_sdp_choice"; }

// Returns the reason why a device or the host NPU cannot capture the call; nullopt if it can.
std::optional<std::string> obstacle(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    const auto name = name_of(op);
    if (op.hasTag(at::Tag::data_dependent_output) || (!returns_tensors(op) && !returns_choice(op))) {
        return "the host reads the result of " + name;
    }
    const auto is_mask = [](const at::Tensor& tensor) {
        return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    };
    const bool selects = name.starts_with("aten::index.Tensor") || name.starts_with("aten::_unsafe_index.");
    if (op.hasTag(at::Tag::dynamic_output_shape) && !selects) {
        return "the shape of the result of " + name + " depends on values, which the host waits for";
    }
    if (selects && std::ranges::any_of(tensors_of(arguments[1]), is_mask)) {
        return "the shape of the result of " + name + " depends on the values of a mask, which the host waits for";
    }
    const auto is_private = [](const at::Tensor& tensor) {
        return tensor.defined() && tensor.is_privateuseone() && !is_in_base_format(tensor);
    };
    if (std::ranges::any_of(tensors_of(arguments), is_private)) {
        return "the host NPU does not capture " + name +
               " of a tensor in a private format: cast it by "
               "torch_npu.npu_format_cast(tensor, 2) first";
    }
    return std::nullopt;
}

// Refuses tensors on several devices, as outside of captures.
void require_one_device(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    Views views;
    for (std::size_t index = 0; index < arguments.size(); ++index) {
        const bool may_be_there = may_be_on_host(op, op.schema().arguments()[index]);
        with_tensors(arguments[index],
                     [&](const at::Tensor& tensor) { return views.view(tensor, may_be_there, false); });
    }
    views.refuse_host_tensors();
}

}  // namespace

bool record_call(const c10::OperatorHandle& op, Stack* stack) {
    const auto count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments(stack->data() + (stack->size() - count), count);
    const auto device = device_of(arguments);
    if (!device) return false;
    // Waits until the queue has made all earlier calls.
    void* const stream = c10_npu::getCurrentNPUStream(device->index()).stream();
    if (!is_captured(stream)) return false;
    const c10::OptionalDeviceGuard guard(*device);
    if (const auto reason = obstacle(op, arguments)) refuse_captured(stream, *reason);
    require_one_device(op, arguments);
    const auto originals = tensors_of(arguments);
    const auto call = std::make_shared<CapturedCall>(op, arguments, *device);
    Stack results;
    rehearse(stream, [&] { results = call->rehearse(originals); });
    if (returns_tensors(op)) record_captured(stream, name_of(op), [call] { call->run(); });
    torch::jit::drop(*stack, count);
    for (auto& result : results) stack->push_back(std::move(result));
    return true;
}

}  // namespace host_npu
