// Which calls an autograd function in C++ takes; those in Python take the others.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <bitset>
#include <optional>

#include "raw_operator.h"

namespace torch_aclnn_ops {

// Ordinary eager calls of floating-point tensors of certain dtypes: outside torch.func's transforms and their tensors,
// which may be alive after them, outside forward-mode AD, and outside a mode that sees the calls of operators.
template <class Function>
struct EagerCalls {
    static inline std::bitset<static_cast<size_t>(c10::ScalarType::NumOptions)> dtypes;

    template <class... Arguments>
    static bool takes(const Arguments&... arguments) {
        return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
               !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
               (is_ordinary(arguments) && ...);
    }

  private:
    static constexpr int64_t kMaxRank = 8;  // of a tensor that an operator of CANN takes

    static bool is_ordinary(const at::Tensor& tensor) {
        const c10::DispatchKeySet wrappers({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::Functionalize});
        const bool is_taken = c10::isFloatingType(tensor.scalar_type())
                                  ? dtypes[static_cast<size_t>(tensor.scalar_type())] && tensor.dim() <= kMaxRank
                                  : tensor.dim() < kMaxRank;  // indices, whose rows have one dimension more
        return is_taken && !tensor.key_set().has_any(wrappers) && !tensor._fw_grad(0).defined();
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
