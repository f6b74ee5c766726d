#include "host_npu_aten/host_call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "host_npu_aten/random.h"
#include "host_npu_aten/wide_arguments.h"

namespace host_npu {
namespace {

// Passes the kernel its own generator, if the operator takes one.
bool give_generator(const c10::OperatorHandle& op, Arguments arguments, std::uint64_t seed) {
    const auto generator = c10::GeneratorType::get();
    for (std::size_t index = 0; index < arguments.size(); ++index) {
        if (!generator->isSubtypeOf(*op.schema().arguments()[index].type())) continue;
        *arguments[index] = at::detail::createCPUGenerator(seed);
        return true;
    }
    return false;
}

}  // namespace

c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& other) {
    if (value.isTensor()) return other(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        const auto tensors = value.toTensorVector();
        list.reserve(tensors.size());
        for (const auto& tensor : tensors) list.push_back(other(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
            list.push_back(tensor ? std::optional(other(*tensor)) : std::nullopt);
        }
        return list;
    }
    return value;
}

std::optional<at::Generator> take_generator(Arguments arguments, c10::Device device) {
    for (auto* const argument : arguments) {
        if (!argument->isGenerator()) continue;
        auto generator = argument->toGenerator();
        TORCH_CHECK(generator.device().type() == device.type(), "Expected a '",
                    c10::DeviceTypeName(device.type(), true), "' device type for generator but found '",
                    c10::DeviceTypeName(generator.device().type(), true), "'");
        *argument = c10::IValue();
        return generator;
    }
    return std::nullopt;
}

void call_on_host(const c10::OperatorHandle& op, Arguments arguments, torch::jit::Stack* stack,
                  std::optional<std::uint64_t> seed, const at::Tensor& out) {
    std::optional<BorrowedGenerator> borrowed;
    if (seed && !give_generator(op, arguments, *seed)) borrowed.emplace(*seed);
    const WideArguments wide(op, arguments);
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    if (out.defined() && !wide.are_wide()) {
        stack->emplace_back(out);
        const auto name = op.operator_name().name.c_str();
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "out").redispatchBoxed(cpu, stack);
    } else {
        op.redispatchBoxed(cpu, stack);
    }
    wide.round_written();
    const auto results = static_cast<std::ptrdiff_t>(op.schema().returns().size());
    for (auto result = stack->end() - results; result != stack->end(); ++result) wide.round_result(*result, out);
    if (has_narrow_indices(op)) stack->back() = stack->back().toTensor().to(at::kInt);
}

}  // namespace host_npu
