// Operators of CANN as formulas: a function over tensors becomes the two functions that CANN exports.
//
//     void swiglu(const Tensor& x, std::int64_t dim, const Out& out) { ... out = at::silu(parts[0]) * parts[1]; }
//     const Formula<"aclnnSwiGlu", swiglu> forward;
//
// Phase one evaluates the function on tensors without memory, so that what PyTorch says of shapes is its refusal. Phase
// two evaluates it on device memory, in the thread of the stream. 16-bit inputs come as float32, and an output rounds.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include "nnopbase/two_phase.h"
#include "opapi/answers.h"

namespace host_npu {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A tensor that a formula assigns its result to.
class Out {
  public:
    explicit Out(const Tensor& tensor) : tensor_(tensor) {}

    void operator=(const Tensor& result) const;
    // What was assigned, as it was rounded.
    Tensor rounded() const;
    at::IntArrayRef sizes() const { return tensor_.sizes(); }

  private:
    Tensor tensor_;
};

// Throws a Refusal if a formula does not take an argument.
void require_taken(const aclTensor* tensor, std::size_t position, bool may_be_absent);
// A tensor of a layout that has no memory.
Tensor without_memory(const Layout& layout);
// A tensor in device memory.
Tensor in_memory(const HostTensor& tensor);
// What a formula calculates with.
Tensor widened(const Tensor& tensor);

// What CANN's function has in the place of a formula's argument, and the argument that is made of it.
template <class Argument>
struct Translated {
    using C = Argument;
};
template <>
struct Translated<Tensor> {
    using C = const aclTensor*;
    static Tensor from(const Tensor& tensor) { return widened(tensor); }
};
template <>
struct Translated<OptionalTensor> {
    using C = const aclTensor*;
    static OptionalTensor from(const Tensor& tensor) {
        return tensor.defined() ? OptionalTensor(widened(tensor)) : std::nullopt;
    }
};
template <>
struct Translated<Out> {
    using C = const aclTensor*;
    static Out from(const Tensor& tensor) { return Out(tensor); }
};

// A string that a template takes.
template <std::size_t size>
struct Text {
    char text[size];
    constexpr Text(const char (&from)[size]) { std::copy_n(from, size, text); }
};

template <Text name, auto function>
class Formula {
  public:
    Formula() : Formula(function) {}

  private:
    template <class... Arguments>
    explicit Formula(void (*)(Arguments...)) {
        using Calls = Calls<std::remove_cvref_t<Arguments>...>;
        answer(name.text, reinterpret_cast<AnyFunction>(&Calls::phase_one),
               reinterpret_cast<AnyFunction>(&Calls::phase_two));
    }

    static const Api& api() {
        static const std::string phase_one = std::string(name.text) + "GetWorkspaceSize";
        static const Api both{name.text, phase_one.c_str()};
        return both;
    }

    template <class... Arguments>
    struct Calls {
        static aclnnStatus phase_one(typename Translated<Arguments>::C... arguments, std::uint64_t* workspace_size,
                                     aclOpExecutor** executor) {
            return PhaseOne(api(), workspace_size, executor).with(arguments...).run([&] {
                std::size_t position = 0;
                (require<Arguments>(arguments, position), ...);
                refuse_errors([&] { evaluate(Described(), arguments...); });
                return Plan{.kernel = [=](const KernelArguments& tensors) {
                    evaluate([&](const aclTensor*, std::size_t index) { return in_memory(tensors[index]); },
                             arguments...);
                }};
            });
        }

        static aclnnStatus phase_two(void* workspace, std::uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
            return host_npu::phase_two(api(), workspace, size, executor, stream);
        }

        struct Described {
            Tensor operator()(const aclTensor* tensor, std::size_t) const {
                return tensor == nullptr ? Tensor() : without_memory(tensor->layout);
            }
        };

        // `tensor_of` makes a tensor of an argument of CANN's and its number among the tensors.
        template <class TensorOf>
        static void evaluate(const TensorOf& tensor_of, typename Translated<Arguments>::C... arguments) {
            const c10::InferenceMode without_autograd;
            std::size_t index = 0;
            const std::tuple<Arguments...> translated{translate<Arguments>(tensor_of, arguments, index)...};
            std::apply(function, translated);
        }

        template <class Argument, class TensorOf, class C>
        static Argument translate(const TensorOf& tensor_of, C argument, std::size_t& index) {
            if constexpr (std::is_pointer_v<C>) {
                return Translated<Argument>::from(tensor_of(argument, index++));
            } else {
                return argument;
            }
        }

        template <class Argument, class C>
        static void require(C argument, std::size_t& position) {
            ++position;
            if constexpr (std::is_pointer_v<C>) {
                require_taken(argument, position, std::is_same_v<Argument, OptionalTensor>);
            }
        }

        template <class Body>
        static void refuse_errors(const Body& body) {
            try {
                body();
            } catch (const c10::Error& error) {
                throw Refusal{kParamInvalid, error.what_without_backtrace()};
            }
        }
    };
};

}  // namespace host_npu
