// The calls that C++ autograd functions support; others fall back to the Python functions.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <bitset>
#include <optional>

#include "raw_operator.h"

namespace torch_aclnn_ops {

// Ordinary eager calls of floating-point tensors of certain dtypes: outside torch.func transforms and without their
// wrapped tensors, outside forward-mode AD, and outside a TorchDispatchMode.
template <class Function>
struct EagerCalls {
    static inline std::bitset<static_cast<size_t>(c10::ScalarType::NumOptions)> dtypes;

    template <class... Arguments>
    static bool include(const Arguments&... arguments) {
        return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
               !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
               (is_ordinary(arguments) && ...);
    }

  private:
    static constexpr int64_t kMaxRank = 8;  // CANN's limit

    static bool is_ordinary(const at::Tensor& tensor) {
        const c10::DispatchKeySet wrappers({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::Functionalize});
        const bool is_supported = c10::isFloatingType(tensor.scalar_type())
                                      ? dtypes[static_cast<size_t>(tensor.scalar_type())] && tensor.dim() <= kMaxRank
                                      : tensor.dim() < kMaxRank;  // indices: the rank of the result is one higher
        return is_supported && !tensor.key_set().has_any(wrappers) && !tensor._fw_grad(0).defined();
    }
    static bool is_ordinary(const std::optional<at::Tensor>& tensor) {
        return !tensor.has_value() || is_ordinary(*tensor);
    }
    template <class Number>
    static bool is_ordinary(const Number&) {
        return true;
    }
};

}  // namespace torch_aclnn_ops
