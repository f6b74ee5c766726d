// Whether calls are dispatched to the CPU kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <type_traits>

namespace torch_aclnn_ops {

template <class Argument>
c10::DispatchKeySet keys_of(const Argument& argument) {
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
        return argument.key_set();
    } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
        return argument.has_value() ? argument->key_set() : c10::DispatchKeySet();
    } else {
        return {};
    }
}

// Whether a call is dispatched to the CPU kernel, apart from autograd and the `skipped` keys.
template <class... Arguments>
bool reaches_cpu(c10::DispatchKeySet skipped, const Arguments&... arguments) {
    skipped = skipped | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
              c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
    const c10::DispatchKeySet keys = c10::impl::computeDispatchKeySet(
        (keys_of(arguments) | ...), c10::DispatchKeySet(c10::DispatchKeySet::FULL) - skipped);
    return keys.highestPriorityTypeId() == c10::DispatchKey::CPU;
}

}  // namespace torch_aclnn_ops
