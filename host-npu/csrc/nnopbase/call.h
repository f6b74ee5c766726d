// A call of an operator after phase one: the kernel and the layouts of its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nnopbase/dtype.h"
#include "nnopbase/status.h"
#include "nnopbase/tensor.h"

namespace host_npu {

// A kernel's view of a tensor; `data` is its first element. An absent optional tensor has no layout.
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

// Enqueues an exchange of data in the workspace with other ranks. Returns why it is refused, if it is.
using Communicate = std::function<std::optional<std::string>(void* workspace, void* stream)>;

// The result of an operator's phase one.
struct Plan {
    std::uint64_t workspace_size = 0;
    // Empty if there is nothing to launch.
    Kernel kernel = {};
    // What a call that communicates does after its kernel, and what it computes then. Phase two calls `communicate` in
    // its caller's thread, so that the calls of a rank are numbered in the order in which it makes them.
    Communicate communicate = {};
    Kernel finish = {};
    // False if a part runs on an AI CPU, which cannot be repeated.
    bool repeatable = true;
    // Set if the launch must fail although phase one succeeds.
    std::optional<Refusal> launch_failure = {};
    // The indices of the output arguments, for individual operators only.
    std::vector<std::size_t> outputs = {};
};

struct Call {
    const char* api;
    // One per argument; nullopt for an absent optional tensor.
    std::vector<std::optional<Layout>> layouts;
    Plan plan;
};

// Enqueues the kernel of `call` on `stream`, with one storage address per argument. Returns a status of phase two.
aclnnStatus launch(const std::shared_ptr<const Call>& call, const std::vector<void*>& storages, void* workspace,
                   std::uint64_t workspace_size, aclrtStream stream);

}  // namespace host_npu
