#include "host_npu_formulas/communicating.h"

#include <numeric>

namespace host_npu {
namespace {

constexpr std::size_t kBufferAlignment = 64;
// The end of a workspace, which kernels cannot use.
constexpr std::size_t kGuard = 64;

std::size_t padded_bytes(const std::vector<std::int64_t>& sizes, at::ScalarType dtype) {
    auto count = c10::elementSize(dtype);
    for (const auto size : sizes) count *= static_cast<std::size_t>(size);
    return (count + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
}

Tensor at_address(void* address, const std::vector<std::int64_t>& sizes, at::ScalarType dtype) {
    return at::from_blob(address, sizes, at::TensorOptions(dtype));
}

HcclDataType link_dtype(at::ScalarType dtype) {
    if (dtype == at::kByte) return HCCL_DATA_TYPE_UINT8;
    return dtype == at::kHalf ? HCCL_DATA_TYPE_FP16 : HCCL_DATA_TYPE_BFP16;
}

// The exchanged tensors and their offsets in the workspace.
class Exchanged {
  public:
    Exchanged(const Communication& communication, const Tensor& sent, const Group& group);

    // received() returns a meta tensor; the others return tensors in the memory of the workspace.
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

Exchanged::Exchanged(const Communication& communication, const Tensor& sent, const Group& group)
    : fused_{communication.function,
             group.name,
             static_cast<std::uint32_t>(group.ranks),
             link_dtype(sent.scalar_type()),
             static_cast<std::uint64_t>(sent.numel()),
             {},
             {}},
      dtype_(sent.scalar_type()),
      sent_(sent.sizes().vec()),
      received_(sent_) {
    if (!communication.sent_rows.empty()) {
        const auto columns = sent.size(1);
        for (const auto rows : communication.sent_rows) fused_.sent.push_back(rows * columns);
        for (const auto rows : communication.received_rows) fused_.received.push_back(rows * columns);
        received_[0] = std::reduce(communication.received_rows.begin(), communication.received_rows.end());
    } else if (fused_.gathers()) {
        received_[0] *= group.ranks;
    }
    if (fused_.function == hccl::Function::MatmulReduceScatter) {
        received_[0] /= group.ranks;
        fused_.count /= fused_.ranks;
    }
    offset_ = padded_bytes(sent_, dtype_);
}

Tensor Exchanged::received() const { return at::empty(received_, at::TensorOptions(dtype_).device(at::kMeta)); }

Tensor Exchanged::sent_in(const KernelArguments& memory) const {
    return at_address(memory.workspace.data(), sent_, dtype_);
}

Tensor Exchanged::received_in(const KernelArguments& memory) const {
    return at_address(memory.workspace.data() + offset_, received_, dtype_);
}

std::uint64_t Exchanged::workspace_size() const { return offset_ + padded_bytes(received_, dtype_) + kGuard; }

std::optional<std::string> Exchanged::communicate(void* workspace, void* stream) const {
    return hccl::communicate(fused_, workspace, static_cast<std::byte*>(workspace) + offset_, stream);
}

}  // namespace

Group Translated<Group>::kept(C name) {
    const auto found = hccl::find_named(name == nullptr ? "" : name);
    require(found.refusal.empty(), kParamInvalid, found.refusal);
    return {name, found.rank, found.ranks};
}

Plan plan_of(const Group& group, const Tensors& tensors, Communicating communicating) {
    std::optional<Exchanged> found;
    const auto look = [&](const Communication& communication) {
        found.emplace(communication, communication.send(), group);
        communication.receive(found->received());
    };
    evaluate_without_memory([&](const Next& next) { communicating(next, look); }, tensors);
    const auto exchanged = *found;
    const auto in_memory = [=](auto part) -> Kernel {
        return [=](const KernelArguments& memory) {
            const auto with_memory = [&](const Communication& communication) {
                part(exchanged, communication, memory);
            };
            evaluate_in_memory([&](const Next& next) { communicating(next, with_memory); }, memory);
        };
    };
    return {
        .workspace_size = exchanged.workspace_size(),
        .kernel = in_memory([](const Exchanged& to, const Communication& communication, const KernelArguments& memory) {
            to.sent_in(memory).copy_(communication.send());
        }),
        .communicate = [=](void* memory, void* stream) { return exchanged.communicate(memory, stream); },
        .finish = in_memory([](const Exchanged& in, const Communication& communication, const KernelArguments& memory) {
            communication.receive(in.received_in(memory));
        }),
    };
}

}  // namespace host_npu
