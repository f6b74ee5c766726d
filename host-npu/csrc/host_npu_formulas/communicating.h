// Operators that compute and communicate at once as formulas: what a rank sends, and what it makes of what it receives.
//
//     Communication matmul_all_reduce(const AnyTensor& x1, ..., const Group& group, const Out& output) {
//         return {Function::MatmulAllReduce, [&] { return product(x1, x2); },
//                 [&](const Tensor& sum) { output = sum; }};
//     }
//     const CommunicatingFormula<"aclnnMatmulAllReduce", matmul_all_reduce> all_reduce{...};
//
// Phase one evaluates both parts without memory, as that of a Formula does. In phase two there are three tasks of the
// stream: the first part, the collective of libhccl, which goes from one half of the workspace to the other, and the
// second part.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <type_traits>

#include "hccl/fused.h"
#include "host_npu_formulas/formula.h"

namespace host_npu {

// A communicator, of which CANN's function gets the name.
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
    // Returns what this rank sends, in the dtype that goes over the links.
    std::function<Tensor()> send;
    std::function<void(const Tensor&)> receive;
};

// What is exchanged, and where it is in the workspace.
class Exchanged {
  public:
    Exchanged(const Communication& communication, const Tensor& sent, const Group& group);

    // A meta tensor for what is received; what is sent and received in the memory of the workspace.
    Tensor received() const;
    Tensor sent_in(const KernelArguments& memory) const;
    Tensor received_in(const KernelArguments& memory) const;

    std::uint64_t workspace_size() const;
    std::optional<std::string> communicate(void* workspace, void* stream) const;

  private:
    hccl::Fused fused_;
    at::ScalarType dtype_;
    std::vector<std::int64_t> sent_, received_;
    std::size_t offset_;
};

template <Text name, auto function>
class CommunicatingFormula : private Exported<name> {
  public:
    CommunicatingFormula(std::initializer_list<TensorRule> rules)
        : CommunicatingFormula(function, Rules{TensorRules(rules)}) {}

  private:
    template <class... Arguments>
    CommunicatingFormula(Communication (*)(Arguments...), Rules rules) {
        this->template export_formula<std::remove_cvref_t<Arguments>...>(
            std::move(rules), reinterpret_cast<AnyFunction>(&Calls<std::remove_cvref_t<Arguments>...>::phase_one),
            true);
    }

    template <class... Arguments>
    struct Calls {
        static aclnnStatus phase_one(typename Translated<Arguments>::C... arguments, std::uint64_t* workspace_size,
                                     aclOpExecutor** executor) {
            const auto ranks = (std::uint32_t{0} + ... + ranks_of<Arguments>(arguments));
            return PhaseOne(CommunicatingFormula::api(), workspace_size, executor).with(arguments..., ranks).run([&] {
                const auto tensors = CommunicatingFormula::template checked_tensors<Arguments...>(arguments...);
                return plan(std::make_tuple(Translated<Arguments>::kept(arguments)...), tensors);
            });
        }

        // A call is not taken from the cache after its communicator has ended.
        template <class Argument>
        static std::uint32_t ranks_of(typename Translated<Argument>::C argument) {
            if constexpr (std::is_same_v<Argument, Group>) {
                return argument == nullptr ? 0 : hccl::find_named(argument).ranks;
            } else {
                return 0;
            }
        }

        template <class Kept>
        static Plan plan(const Kept& kept, const Tensors& tensors) {
            std::optional<Exchanged> found;
            refuse_errors([&] {
                const auto look = [&](const Communication& communication) {
                    found.emplace(communication, communication.send(), std::get<Group>(kept));
                    communication.receive(found->received());
                };
                with(kept, [&](std::size_t index) { return meta_tensor(tensors[index]); }, look);
            });
            const auto exchanged = *found;
            const auto in = [](const KernelArguments& memory) {
                return [&](std::size_t index) { return in_memory(memory[index]); };
            };
            return {
                .workspace_size = exchanged.workspace_size(),
                .kernel =
                    [=](const KernelArguments& memory) {
                        without_backtrace([&] {
                            with(kept, in(memory), [&](const Communication& communication) {
                                exchanged.sent_in(memory).copy_(communication.send());
                            });
                        });
                    },
                .communicate = [=](void* memory, void* stream) { return exchanged.communicate(memory, stream); },
                .finish =
                    [=](const KernelArguments& memory) {
                        without_backtrace([&] {
                            with(kept, in(memory), [&](const Communication& communication) {
                                communication.receive(exchanged.received_in(memory));
                            });
                        });
                    },
            };
        }

        template <class Kept, class TensorOf, class Body>
        static void with(const Kept& kept, const TensorOf& tensor_of, const Body& body) {
            evaluate<Arguments...>(kept, tensor_of, [&](const auto&... each) { body(function(each...)); });
        }
    };
};

}  // namespace host_npu
