// Enqueues calls on streams.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "ascendcl/device.h"
#include "nnopbase/call.h"

namespace host_npu {
namespace {

constexpr std::size_t kCanaryBytes = 64;
constexpr auto kCanary = std::byte{0xA5};

// The maximum number of elements of a tensor, including repetitions through a stride of 0.
constexpr std::int64_t kMostElements = std::int64_t{1} << 48;

// Returns the host view of a tensor with this layout and storage. Throws if any part of it is outside device memory.
HostTensor on_host(const Layout& layout, void* storage) {
    if (layout.empty()) return {&layout, nullptr};
    std::int64_t elements = 1;
    for (const auto size : layout.shape) {
        if (size < 0) throw std::out_of_range("a tensor has a dimension of " + std::to_string(size) + " elements");
        elements = saturated_product(elements, size);
    }
    const auto [first, last] = layout.reach();
    const auto size = static_cast<std::int64_t>(item_size(layout.dtype));
    if (elements > kMostElements || first < -kMostElements || last > kMostElements) {
        throw std::out_of_range("a tensor from element " + std::to_string(first) + " to " + std::to_string(last) +
                                " of its storage is larger than any device memory");
    }
    const auto start = reinterpret_cast<std::uintptr_t>(storage) + static_cast<std::uintptr_t>(first * size);
    const auto bytes =
        static_cast<std::size_t>(is_packed(layout.dtype) ? (last - first + 2) / 2 : (last - first + 1) * size);
    auto* const first_element = static_cast<std::byte*>(host_alias(reinterpret_cast<const void*>(start), bytes));
    return {&layout, first_element + (layout.offset - first) * size};
}

// The workspace of a call, followed by a pattern that the kernel must not overwrite.
class Workspace {
  public:
    Workspace(void* workspace, std::uint64_t given, std::uint64_t asked_for) {
        if (asked_for == 0) return;
        if (workspace == nullptr || given < asked_for) {
            throw std::runtime_error("the kernel needs a workspace of " + std::to_string(asked_for) +
                                     " bytes and got " + std::to_string(workspace == nullptr ? 0 : given));
        }
        const std::span all(static_cast<std::byte*>(host_alias(workspace, asked_for)), asked_for);
        canary_ = all.last(std::min(kCanaryBytes, all.size()));
        usable_ = all.first(all.size() - canary_.size());
        std::fill(canary_.begin(), canary_.end(), kCanary);
    }

    std::span<std::byte> usable() const { return usable_; }

    void check() const {
        if (std::any_of(canary_.begin(), canary_.end(), [](std::byte byte) { return byte != kCanary; })) {
            throw std::runtime_error("the workspace was written to while the kernel used it");
        }
    }

  private:
    std::span<std::byte> usable_;
    std::span<std::byte> canary_;
};

void run(const Call& call, const Kernel& kernel, const std::vector<void*>& storages, void* workspace,
         std::uint64_t workspace_size) {
    std::vector<HostTensor> tensors(call.layouts.size());
    for (std::size_t index = 0; index < tensors.size(); ++index) {
        if (call.layouts[index]) tensors[index] = on_host(*call.layouts[index], storages[index]);
    }
    const Workspace guarded(workspace, workspace_size, call.plan.workspace_size);
    kernel({tensors, guarded.usable()});
    guarded.check();
}

aclnnStatus launched(const Call& call, std::int32_t status) {
    if (status == ACL_SUCCESS) return kSuccess;
    return failed(kRuntimeError, call.api, "the launch failed with ACL status " + std::to_string(status));
}

}  // namespace

aclnnStatus launch(const std::shared_ptr<const Call>& call, const std::vector<void*>& storages, void* workspace,
                   std::uint64_t workspace_size, aclrtStream stream) {
    if (const auto& failure = call->plan.launch_failure) return failed(failure->status, call->api, failure->text);
    if (!call->plan.kernel) return kSuccess;
    if (call->plan.communicate) {
        if (const auto refused = refused_if_captured(stream, call->api)) return launched(*call, *refused);
        if (workspace == nullptr || workspace_size < call->plan.workspace_size) {
            return failed(kParamInvalid, call->api,
                          "the workspace has " + std::to_string(workspace == nullptr ? 0 : workspace_size) +
                              " bytes, phase one asked for " + std::to_string(call->plan.workspace_size));
        }
    }
    const auto task_of = [&](const Kernel& kernel) {
        return [call, &kernel, storages, workspace, workspace_size] {
            run(*call, kernel, storages, workspace, workspace_size);
        };
    };
    const auto status = launched(*call, enqueue_launch(stream, call->api, task_of(call->plan.kernel)));
    if (status != kSuccess || !call->plan.communicate) return status;
    if (const auto refusal = call->plan.communicate(workspace, stream)) {
        return failed(kRuntimeError, call->api, *refusal);
    }
    return launched(*call, enqueue(stream, call->api, task_of(call->plan.finish)));
}

}  // namespace host_npu
