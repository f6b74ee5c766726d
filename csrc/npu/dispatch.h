// What stands between PyTorch's dispatcher and a kernel: device guard, checks, and the choice of the autograd path.
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

    // The kernel for npu tensors. Its first argument is a tensor for every operator; the others must be on its device.
    static Result kernel(Parameters... arguments) {
        if (checks_values.load(std::memory_order_relaxed)) {
            check_in_python(Operator::name, {c10::IValue(arguments)...}, true);
        }
        // On a chip without the operator some of CANN's fail only in the queue, and the queue does not survive it.
        if (!chip_has_it.load(std::memory_order_relaxed)) {
            check_chip_in_python(Operator::name, {c10::IValue(arguments)...});
            chip_has_it.store(true, std::memory_order_relaxed);
        }
        // A guard for the current device costs more than to ask for it.
        const c10::Device device = first(arguments...).device();
        c10::OptionalDeviceGuard guard;
        if (!is_current(device)) {
            guard.reset_device(device);
        }
        const at::AutoDispatchBelowADInplaceOrView below;
        try {
            return Operator::run(arguments...);
        } catch (const c10::Error&) {
            // An argument that is wrong on every device gets the same exception as on every device. What is left is
            // about this device: what its operators do not take, and what failed.
            check_in_python(Operator::name, {c10::IValue(arguments)...}, false);
            throw;
        }
    }

    // In front of the kernel for tensors that autograd may look at. The derivatives are in Python, registered for the
    // dispatch key Autograd; this kernel hides them for npu tensors, so that a call that needs none does not pay for
    // Python. Under the key AutogradOther they can still be reached.
    static Result autograd(c10::DispatchKeySet keys, Parameters... arguments) {
        const bool grad_mode = c10::GradMode::is_enabled();
        if ((needs_derivative(arguments, grad_mode) || ...)) {
            const auto with_derivatives = (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
            return handle().redispatch(with_derivatives, arguments...);
        }
        if ((keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::PrivateUse1) {
            return kernel(arguments...);
        }
        // A mode or a transform (FakeTensor, functorch, ...) has its turn before the kernel.
        const at::AutoDispatchBelowAutograd below;
        return handle().redispatch(keys & c10::after_autograd_keyset, arguments...);
    }

  private:
    static inline std::atomic<bool> chip_has_it = false;

    template <class... Rest>
    static const at::Tensor& first(const at::Tensor& tensor, const Rest&...) {
        return tensor;
    }
};

template <class Operator>
using DispatchOf = Dispatch<Operator, decltype(&Operator::run)>;

}  // namespace torch_aclnn_ops
