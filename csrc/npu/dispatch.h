// The layer between PyTorch's dispatcher and a kernel: device guard, checks and autograd dispatch.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>

#include "../autograd/raw_operator.h"
#include "checks.h"
#include "tensor.h"

namespace torch_aclnn_ops {

template <class Operator, class Function>
struct Dispatch;

template <class Operator, class Result, class... Parameters>
struct Dispatch<Operator, Result (*)(Parameters...)> : RawOperator<Operator, Result (*)(Parameters...)> {
    static constexpr auto name = Operator::name;
    using RawOperator<Operator, Result (*)(Parameters...)>::handle;

    // The kernel for NPU tensors. The first argument of every operator is a tensor; the others must be on its device.
    static Result kernel(Parameters... arguments) { return checked(Operator::run, arguments...); }

    // Calls a function with the operator's arguments like kernel(): on their device, with the operator's checks.
    template <class Function>
    static auto checked(const Function& function, Parameters... arguments) {
        if (checks_values.load(std::memory_order_relaxed)) {
            check_in_python(Operator::name, {c10::IValue(arguments)...}, true);
        }
        // On chips that lack an operator, some of CANN's functions fail only in the queue, which stops the queue.
        if (!chip_has_it.load(std::memory_order_relaxed)) {
            check_chip_in_python(Operator::name, {c10::IValue(arguments)...});
            chip_has_it.store(true, std::memory_order_relaxed);
        }
        // Checking the current device is cheaper than a guard.
        const c10::Device device = device_of_first(arguments...);
        c10::OptionalDeviceGuard guard;
        if (!is_current(device)) {
            guard.reset_device(device);
        }
        const at::AutoDispatchBelowADInplaceOrView below;
        try {
            return function(arguments...);
        } catch (const c10::Error&) {
            // Arguments that are invalid on every device raise the same exception everywhere. Other errors are specific
            // to this device: unsupported arguments and failures.
            check_in_python(Operator::name, {c10::IValue(arguments)...}, false);
            throw;
        }
    }

    // The autograd kernel for npu tensors. Derivatives are implemented in Python under the dispatch key Autograd; this
    // kernel overrides it, so that calls without derivatives avoid Python, and redispatches to AutogradOther otherwise.
    static Result autograd(c10::DispatchKeySet keys, Parameters... arguments) {
        const bool grad_mode = c10::GradMode::is_enabled();
        if ((needs_derivative(arguments, grad_mode) || ...)) {
            const auto with_derivatives = (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
            return handle().redispatch(with_derivatives, arguments...);
        }
        if ((keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::PrivateUse1) {
            return kernel(arguments...);
        }
        // Modes and transforms (FakeTensor, functorch, ...) are dispatched before the kernel.
        const at::AutoDispatchBelowAutograd below;
        return handle().redispatch(keys & c10::after_autograd_keyset, arguments...);
    }

  private:
    static inline std::atomic<bool> chip_has_it = false;
};

template <class Operator>
using DispatchOf = Dispatch<Operator, decltype(&Operator::run)>;

}  // namespace torch_aclnn_ops
