// Formulas: a function over tensors becomes the two functions of an operator that CANN exports.
//
//     void swiglu(const Tensor& x, std::int64_t dim, const Out& out) { ... out = at::silu(parts[0]) * parts[1]; }
//     const Formula<"aclnnSwiGlu", swiglu> forward;
//
// Phase one evaluates the function on tensors without memory, and refuses shapes that PyTorch refuses. Phase two
// evaluates it on device memory, on the stream's thread. 16-bit inputs are converted to float32, and outputs are
// rounded.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "host_npu_formulas/rules.h"
#include "nnopbase/containers.h"
#include "nnopbase/two_phase.h"
#include "opapi/answers.h"

namespace host_npu {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A tensor of integers or booleans, passed unchanged.
struct IntegerTensor : Tensor {
    IntegerTensor() = default;
    explicit IntegerTensor(const Tensor& tensor) : Tensor(tensor) {}
};
using OptionalIntegerTensor = std::optional<IntegerTensor>;

// A tensor of any dtype, passed unchanged.
struct AnyTensor : Tensor {
    AnyTensor() = default;
    explicit AnyTensor(const Tensor& tensor) : Tensor(tensor) {}
};
using OptionalAnyTensor = std::optional<AnyTensor>;

// A tensor to which a formula assigns a result.
class Out {
  public:
    Out() = default;
    explicit Out(const Tensor& tensor) : tensor_(tensor) {}

    void operator=(const Tensor& result) const;
    // The assigned values after rounding.
    Tensor rounded() const;
    at::IntArrayRef sizes() const { return tensor_.sizes(); }
    at::ScalarType dtype() const { return tensor_.scalar_type(); }
    // The memory itself, for formulas that modify part of it.
    const Tensor& in_place() const { return tensor_; }

  private:
    Tensor tensor_;
};
using OptionalOut = std::optional<Out>;

// Returns the dimension in which elements are packed in pairs: the one with stride 1.
std::size_t packed_dimension(at::IntArrayRef strides);
// Returns a meta tensor of the same shape and dtype; undefined for a null pointer.
Tensor meta_tensor(const aclTensor* tensor);
// Returns a tensor in device memory.
Tensor in_memory(const HostTensor& tensor);
// Returns the name of a dtype in torch, such as "float16".
std::string name_of(at::ScalarType dtype);
// Converts 16-bit floats to float32, in which formulas compute.
Tensor widened(const Tensor& tensor);
// Refuses indices outside 0 to size - 1, including negative ones. Phase one has no values to check.
void require_indices(const char* name, const Tensor& indices, std::int64_t size);
// Returns the value of a scalar.
double number(const aclScalar* scalar);

// Returns the next tensor of a call.
using Next = std::function<Tensor()>;

// The conversion of an argument of CANN's function, of type `C`, to an argument of a formula. The call outlives CANN's
// objects, so `kept` copies their values, `list` collects the tensors, and `from` builds the argument from both.
struct WithoutTensors {
    static constexpr bool kHasRule = false;
    template <class C>
    static void list(const C&, TensorArguments&) {}
};

template <class Argument>
struct Translated : WithoutTensors {
    using C = Argument;
    static Argument kept(C argument) { return argument; }
    static Argument from(Argument argument, const Next&) { return argument; }
};

template <class Argument, Taken taken, bool optional = false>
struct TranslatedTensor {
    using C = const aclTensor*;
    static std::nullptr_t kept(C) { return nullptr; }
    static void list(C tensor, TensorArguments& given) {
        if constexpr (std::is_same_v<Argument, Out> || std::is_same_v<Argument, OptionalOut>) {
            require(tensor == nullptr || tensor->layout.format != ACL_FORMAT_FRACTAL_NZ, kParamInvalid,
                    "the host NPU does not write results in FRACTAL_NZ");
        }
        given.add(tensor, taken, optional);
    }
    static constexpr auto kTaken = taken;
    static constexpr bool kHasRule = true;
    static Argument from(std::nullptr_t, const Next& next) {
        const auto tensor = next();
        if constexpr (optional) {
            if (!tensor.defined()) return std::nullopt;
        }
        if constexpr (taken == Taken::kFloats) {
            return Argument(widened(tensor));
        } else if constexpr (optional) {
            return typename Argument::value_type(tensor);
        } else {
            return Argument(tensor);
        }
    }
};
template <>
struct Translated<Tensor> : TranslatedTensor<Tensor, Taken::kFloats> {};
template <>
struct Translated<OptionalTensor> : TranslatedTensor<OptionalTensor, Taken::kFloats, true> {};
template <>
struct Translated<IntegerTensor> : TranslatedTensor<IntegerTensor, Taken::kIntegers> {};
template <>
struct Translated<OptionalIntegerTensor> : TranslatedTensor<OptionalIntegerTensor, Taken::kIntegers, true> {};
template <>
struct Translated<AnyTensor> : TranslatedTensor<AnyTensor, Taken::kAll> {};
template <>
struct Translated<OptionalAnyTensor> : TranslatedTensor<OptionalAnyTensor, Taken::kAll, true> {};
template <>
struct Translated<Out> : TranslatedTensor<Out, Taken::kAll> {};
template <>
struct Translated<OptionalOut> : TranslatedTensor<OptionalOut, Taken::kAll, true> {};

// A string literal as a template argument.
template <std::size_t size>
struct Text {
    char text[size];
    constexpr Text(const char (&from)[size]) { std::copy_n(from, size, text); }
};

// A tensor for an option that the formula does not support, which must be a null pointer.
template <Text option>
struct Without {};
template <Text option>
struct Translated<Without<option>> {
    using C = const aclTensor*;
    static constexpr bool kHasRule = false;
    static std::nullptr_t kept(C) { return nullptr; }
    static void list(C tensor, TensorArguments& given) {
        require(tensor == nullptr, kParamInvalid, "the host NPU computes this without ", option.text, " only");
        given.tensors.push_back(tensor);
    }
    static Without<option> from(std::nullptr_t, const Next& next) {
        next();
        return {};
    }
};

// An absent list is an empty list.
template <class Member>
    requires std::is_same_v<Member, Tensor> || std::is_same_v<Member, AnyTensor> || std::is_same_v<Member, Out>
struct Translated<std::vector<Member>> {
    using C = const aclTensorList*;
    static constexpr bool kHasRule = true;
    static std::size_t kept(C argument) { return argument == nullptr ? 0 : argument->members.size(); }
    static void list(C argument, TensorArguments& given) { given.add(argument, Translated<Member>::kTaken); }
    static std::vector<Member> from(std::size_t size, const Next& next) {
        std::vector<Member> members;
        for (std::size_t index = 0; index < size; ++index) members.push_back(Translated<Member>::from(nullptr, next));
        return members;
    }
};
template <>
struct Translated<std::vector<std::int64_t>> : WithoutTensors {
    using C = const aclIntArray*;
    using Values = std::vector<std::int64_t>;
    static Values kept(C argument) { return argument == nullptr ? Values() : argument->values; }
    static Values from(const Values& values, const Next&) { return values; }
};
// An optional aclBoolArray.
struct Bools {
    std::vector<std::uint8_t> values;
    bool given = false;
};
template <>
struct Translated<Bools> : WithoutTensors {
    using C = const aclBoolArray*;
    static Bools kept(C argument) { return argument == nullptr ? Bools() : Bools{argument->values, true}; }
    static Bools from(const Bools& values, const Next&) { return values; }
};
template <>
struct Translated<std::string> : WithoutTensors {
    using C = const char*;
    static std::string kept(C argument) { return argument == nullptr ? "" : argument; }
    static std::string from(const std::string& text, const Next&) { return text; }
};
// An aclScalar.
struct Number {
    double value;
    operator double() const { return value; }
};
template <>
struct Translated<Number> : WithoutTensors {
    using C = const aclScalar*;
    static double kept(C argument) { return number(argument); }
    static Number from(double value, const Next&) { return {value}; }
};

// Calls a formula with the kept arguments and the tensors that `next` returns.
using Evaluation = std::function<void(const Next& next)>;

// Evaluates in phase one, on tensors without memory. Errors of PyTorch and TORCH_CHECK become a Refusal.
void evaluate_without_memory(const Evaluation& evaluation, const Tensors& tensors);

// Evaluates on the thread of a stream. Errors of PyTorch lose their C++ backtrace.
void evaluate_in_memory(const Evaluation& evaluation, const KernelArguments& memory);

// Consecutive members of an object, shared by several versions of a function.
template <auto... members>
struct Members {
    template <auto... others>
    constexpr Members<members..., others...> operator+(Members<others...>) const {
        return {};
    }
};
template <auto member>
constexpr auto as_members() {
    if constexpr (std::is_member_object_pointer_v<decltype(member)>) {
        return Members<member>{};
    } else {
        return member;
    }
}

template <class Result, class Call>
Call call_of(Result (*)(const Call&));
template <class Object, class Value>
Value value_of(Value Object::*);
template <auto function, auto... members>
auto call_with(const decltype(value_of(members))&... arguments) {
    decltype(call_of(function)) call{};
    ((call.*members = arguments), ...);
    return function(call);
}
template <auto function, auto... members>
constexpr auto caller(Members<members...>) {
    return &call_with<function, members...>;
}

// Converts a function of one object to a function of its members, given one by one or as lists. Each version of an
// operator lists the members that it takes, in order:
//
//     constexpr Members<&Grouped::x, &Grouped::weight> kMatrices;
//     const Formula<"aclnnGroupedMatmulV4", collected<grouped, kMatrices, &Grouped::bias>> of_rows{...};
template <auto function, auto... parts>
constexpr auto collected = caller<function>((Members<>{} + ... + as_members<parts>()));

// The names of the two functions that CANN exports.
template <Text name>
struct Names {
    static constexpr char kSuffix[] = "GetWorkspaceSize";
    struct PhaseOneName {
        char text[sizeof(name.text) - 1 + sizeof(kSuffix)];
    };
    static constexpr PhaseOneName phase_one_name() {
        PhaseOneName whole{};
        std::copy_n(kSuffix, sizeof(kSuffix), std::copy_n(name.text, sizeof(name.text) - 1, whole.text));
        return whole;
    }
    static constexpr PhaseOneName kPhaseOne = phase_one_name();
    static constexpr Api kBoth{name.text, kPhaseOne.text};
};

// The code shared by all functions; it is compiled once because there are hundreds. `type` is the type of phase one,
// from which its header is generated.
void export_formula(const Api& names, Rules& exported, Rules rules, std::size_t count, AnyFunction phase_one,
                    AnyFunction phase_two, const std::type_info& type);
// Returns the plan of phase one for these tensors.
Plan plan_of(const Rules& rules, const Tensors& tensors, Evaluation evaluation);

// The exports of a formula other than its phase one.
template <Text name>
class Exported {
  protected:
    template <class... Arguments>
    static void export_as(Rules rules, AnyFunction phase_one) {
        constexpr auto count = (std::size_t{0} + ... + Translated<Arguments>::kHasRule);
        export_formula(api(), rules_, std::move(rules), count, phase_one, reinterpret_cast<AnyFunction>(&phase_two),
                       typeid(aclnnStatus(typename Translated<Arguments>::C..., std::uint64_t*, aclOpExecutor**)));
    }

    static const Api& api() { return Names<name>::kBoth; }

    // Returns the tensors among the arguments, or throws a Refusal.
    template <class... Arguments>
    static Tensors checked_tensors(typename Translated<Arguments>::C... arguments) {
        TensorArguments given;
        (Translated<Arguments>::list(arguments, given), ...);
        require_rules(rules_, given);
        return std::move(given.tensors);
    }

    static const Rules& rules() { return rules_; }

  private:
    static aclnnStatus phase_two(void* workspace, std::uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
        return host_npu::phase_two(api(), workspace, size, executor, stream);
    }

    // Constant-initialized, so that no later initialization overwrites the rules of a formula.
    static inline constinit Rules rules_{};
};

template <Text name, auto function>
class Formula : private Exported<name> {
  public:
    Formula(std::initializer_list<TensorRule> rules = {}) : Formula(TensorRules(rules)) {}
    explicit Formula(TensorRules tensors, Together together = {})
        : Formula(function, Rules{std::move(tensors), std::move(together)}) {}

  private:
    template <class... Arguments>
    explicit Formula(void (*)(Arguments...), Rules rules) {
        this->template export_as<std::remove_cvref_t<Arguments>...>(
            std::move(rules), reinterpret_cast<AnyFunction>(&phase_one<std::remove_cvref_t<Arguments>...>));
    }

    template <class... Arguments>
    static aclnnStatus phase_one(typename Translated<Arguments>::C... arguments, std::uint64_t* workspace_size,
                                 aclOpExecutor** executor) {
        return PhaseOne(Formula::api(), workspace_size, executor).with(arguments...).run([&] {
            const auto tensors = Formula::template checked_tensors<Arguments...>(arguments...);
            return plan_of(Formula::rules(), tensors,
                           [... kept = Translated<Arguments>::kept(arguments)](const Next& next) {
                               const std::tuple<Arguments...> translated{Translated<Arguments>::from(kept, next)...};
                               std::apply(function, translated);
                           });
        });
    }
};

}  // namespace host_npu
