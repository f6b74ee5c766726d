// Formulas of operators that compute and communicate: what a rank sends, and the computation on what it receives.
//
//     Communication matmul_all_reduce(const AnyTensor& x1, ..., const Group& group, const Out& output) {
//         return {Function::MatmulAllReduce, [&] { return product(x1, x2); },
//                 [&](const Tensor& sum) { output = sum; }};
//     }
//     const CommunicatingFormula<"aclnnMatmulAllReduce", matmul_all_reduce> all_reduce{...};
//
// Phase one evaluates both parts without memory, like that of a Formula. Phase two enqueues three tasks: the first
// part, a collective of libhccl from one half of the workspace to the other, and the second part.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <type_traits>

#include "hccl/fused.h"
#include "host_npu_formulas/formula.h"

namespace host_npu {

// A communicator, which CANN's function takes by name.
struct Group {
    std::string name;
    std::int64_t rank, ranks;
};
template <>
struct Translated<Group> : WithoutTensors {
    using C = const char*;
    static Group kept(C name);
    static Group from(const Group& group, const Next&) { return group; }
};

struct Communication {
    hccl::Function function;
    // Returns the data that this rank sends, in the dtype of the transfer.
    std::function<Tensor()> send;
    std::function<void(const Tensor&)> receive;
    // The numbers of rows sent to and received from each rank, if they differ; otherwise empty.
    std::vector<std::int64_t> sent_rows{}, received_rows{};
};

// Calls `body` with the communication of a formula, whose parts reference the formula's arguments.
using Communicating = std::function<void(const Next& next, const std::function<void(const Communication&)>& body)>;
Plan plan_of(const Group& group, const Tensors& tensors, Communicating communicating);

template <Text name, auto function>
class CommunicatingFormula : private Exported<name> {
  public:
    CommunicatingFormula(std::initializer_list<TensorRule> rules)
        : CommunicatingFormula(function, Rules{TensorRules(rules)}) {}

  private:
    template <class... Arguments>
    CommunicatingFormula(Communication (*)(Arguments...), Rules rules) {
        this->template export_as<std::remove_cvref_t<Arguments>...>(
            std::move(rules), reinterpret_cast<AnyFunction>(&phase_one<std::remove_cvref_t<Arguments>...>));
    }

    template <class... Arguments>
    static aclnnStatus phase_one(typename Translated<Arguments>::C... arguments, std::uint64_t* workspace_size,
                                 aclOpExecutor** executor) {
        const auto ranks = (std::uint32_t{0} + ... + ranks_of<Arguments>(arguments));
        return PhaseOne(CommunicatingFormula::api(), workspace_size, executor).with(arguments..., ranks).run([&] {
            const auto tensors = CommunicatingFormula::template checked_tensors<Arguments...>(arguments...);
            const auto kept = std::make_tuple(Translated<Arguments>::kept(arguments)...);
            return plan_of(std::get<Group>(kept), tensors, [kept](const Next& next, const auto& body) {
                std::apply(
                    [&](const auto&... each) {
                        const std::tuple<Arguments...> translated{Translated<Arguments>::from(each, next)...};
                        body(std::apply(function, translated));
                    },
                    kept);
            });
        });
    }

    // The number of ranks is part of the cache key, so that no cached call is reused after its communicator has ended.
    template <class Argument>
    static std::uint32_t ranks_of(typename Translated<Argument>::C argument) {
        if constexpr (std::is_same_v<Argument, Group>) {
            return argument == nullptr ? 0 : hccl::find_named(argument).ranks;
        } else {
            return 0;
        }
    }
};

}  // namespace host_npu
