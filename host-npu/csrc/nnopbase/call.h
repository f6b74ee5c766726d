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

// A kernel's view of a tensor; `data` points to its first element. An absent optional tensor has no layout.
struct HostTensor {
    const Layout* layout = nullptr;
    std::byte* data = nullptr;

    explicit operator bool() const { return layout != nullptr; }
    const Layout* operator->() const { return layout; }
};

// The tensors of a call, in the order of its arguments, and its workspace.
struct KernelArguments {
    std::span<const HostTensor> tensors;
    std::span<std::byte> workspace;

    const HostTensor& operator[](std::size_t index) const { return tensors[index]; }
};

using Kernel = std::function<void(const KernelArguments&)>;

// Enqueues an exchange of workspace data with other ranks. Returns the reason if it is refused.
using Communicate = std::function<std::optional<std::string>(void* workspace, void* stream)>;

// The result of an operator's phase one.
struct Plan {
    std::uint64_t workspace_size = 0;
    // Empty if there is nothing to launch.
    Kernel kernel = {};
    // For a call that communicates: the exchange after `kernel`, and the computation after the exchange. Phase two
    // calls `communicate` on the caller's thread, so that a rank's calls are numbered in order.
    Communicate communicate = {};
    Kernel finish = {};
    // False if a part runs on an AI CPU, which makes the call unrepeatable.
    bool repeatable = true;
    // Set if the launch must fail although phase one succeeds.
    std::optional<Refusal> launch_failure = {};
    // The indices of the output arguments; for individual operators only.
    std::vector<std::size_t> outputs = {};
};

struct Call {
    const char* api;
    // One layout per argument; nullopt for an absent optional tensor.
    std::vector<std::optional<Layout>> layouts;
    Plan plan;
};

// Enqueues the kernel of `call` on `stream`. `storages` has one address per argument. Returns a status of phase two.
aclnnStatus launch(const std::shared_ptr<const Call>& call, const std::vector<void*>& storages, void* workspace,
                   std::uint64_t workspace_size, aclrtStream stream);

}  // namespace host_npu
