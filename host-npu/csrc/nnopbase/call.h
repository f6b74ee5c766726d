// A call of an operator as phase one leaves it: what runs, on tensors of which layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nnopbase/dtype.h"
#include "nnopbase/status.h"
#include "nnopbase/tensor.h"

namespace host_npu {

// A tensor as a kernel sees it: `data` is the view's first element. An absent optional tensor has no layout.
struct HostTensor {
    const Layout* layout = nullptr;
    std::byte* data = nullptr;

    explicit operator bool() const { return layout != nullptr; }
    const Layout* operator->() const { return layout; }
};

// The tensors of a call in the order of its arguments, and its workspace.
struct KernelArguments {
    std::span<const HostTensor> tensors;
    std::span<std::byte> workspace;

    const HostTensor& operator[](std::size_t index) const { return tensors[index]; }
};

using Kernel = std::function<void(const KernelArguments&)>;

// What an operator decides in phase one.
struct Plan {
    std::uint64_t workspace_size = 0;
    // Empty if there is nothing to launch.
    Kernel kernel = {};
    // Parts of the work cannot be repeated if they run on an AI CPU.
    bool repeatable = true;
    // Set if phase one cannot see that the launch will fail.
    std::optional<Refusal> launch_failure = {};
    // The arguments that are outputs; only individual operators are asked for them.
    std::vector<std::size_t> outputs = {};
};

struct Call {
    const char* api;
    // One an argument; nothing for an absent optional tensor.
    std::vector<std::optional<Layout>> layouts;
    Plan plan;
};

// Puts the kernel of `call` on `stream`, with one storage address an argument. Returns a status of phase two.
aclnnStatus launch(const std::shared_ptr<const Call>& call, const std::vector<void*>& storages, void* workspace,
                   std::uint64_t workspace_size, aclrtStream stream);

}  // namespace host_npu
