// The libFuzzer target: calls of all operators with invalid arguments, see tests/fuzz.py.
//
// An input is a list of calls. A call that phase one accepts is launched if its tensors are small. Nothing may crash; a
// refusal leaves the caller's variables unchanged; destroyed objects are gone.
#include <array>
#include <cstdlib>
#include <iostream>
#include <tuple>
#include <vector>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"
#include "tests/calls.h"
#include "tests/fuzz/input.h"

extern "C" const char* host_npu_stats_json();

namespace fuzz {
namespace {

constexpr std::size_t kMostTensors = 16;
constexpr std::size_t kBytesOfTensor = 16 * 1024;
// Limits of a launch, which allow thousands per second.
constexpr std::int64_t kMostElements = 2048;
constexpr std::uint64_t kMostWorkspace = std::uint64_t{32} << 20;

void require(bool fine, const char* what) {
    if (fine) return;
    std::cerr << "fuzz: " << what << std::endl;
    std::abort();
}

// Memory and a stream, shared by all inputs.
struct Device {
    Device() : workspace(kMostWorkspace) {
        for (std::size_t index = 0; index < kMostTensors; ++index) tensors.emplace_back(kBytesOfTensor);
    }
    static Device& instance() {
        static auto& device = *new Device;
        return device;
    }
    void fill(std::uint8_t byte) const {
        for (const auto& memory : tensors) aclrtMemset(memory.address(), kBytesOfTensor, byte, kBytesOfTensor);
    }

    std::vector<test::Memory> tensors;
    test::Memory workspace;
    test::Stream stream;
};

// The arguments of a call, decoded from the input.
class Arguments {
  public:
    explicit Arguments(Input& input) : input_(input) {}
    Arguments(const Arguments&) = delete;
    Arguments& operator=(const Arguments&) = delete;
    ~Arguments() { destroy(); }

    template <class Type>
    Type next() {
        if constexpr (std::is_same_v<Type, std::uint64_t*>) {
            return has_null_size_ ? nullptr : &workspace_size;
        } else if constexpr (std::is_same_v<Type, aclOpExecutor**>) {
            return has_null_executor_ ? nullptr : &executor;
        } else if constexpr (std::is_enum_v<Type>) {
            return input_.enumeration<Type>();
        } else if constexpr (std::is_pointer_v<Type>) {
            return tensor();
        } else if constexpr (std::is_same_v<Type, bool>) {
            return (input_.byte() & 1) != 0;
        } else if constexpr (std::is_floating_point_v<Type>) {
            return input_.floating<Type>();
        } else {
            return static_cast<Type>(input_.integer());
        }
    }

    void destroy() {
        for (const auto* tensor : tensors_) aclDestroyTensor(tensor);
        tensors_.clear();
    }

    bool are_small() const { return are_small_; }
    bool lack_results() const { return has_null_size_ || has_null_executor_; }
    aclTensor* any() { return tensors_.empty() ? nullptr : tensors_[input_.byte() % tensors_.size()]; }

    static constexpr std::uint64_t kUntouched = 12345;
    std::uint64_t workspace_size = kUntouched;
    aclOpExecutor* executor = nullptr;

  private:
    aclTensor* tensor() {
        enum : unsigned {
            kPresent = 1,
            kStrides = 2,
            kOffset = 4,
            kFormat = 8,
            kStorage = 16,
            kAddress = 32,
            kSame = 64
        };
        const unsigned flags = input_.byte();
        if ((flags & kPresent) == 0) return nullptr;
        if ((flags & kSame) != 0 && !tensors_.empty()) return any();
        const auto dtype = input_.enumeration<aclDataType>();
        const auto shape = dims(input_.byte() % 28);
        const auto strides = dims((flags & kStrides) != 0 ? shape.size() : 0);
        const auto offset = (flags & kOffset) != 0 ? input_.integer() : 0;
        const auto format = (flags & kFormat) != 0 ? input_.enumeration<aclFormat>() : ACL_FORMAT_ND;
        const auto storage = (flags & kStorage) != 0 ? dims(input_.byte() % 28) : shape;
        void* const address = (flags & kAddress) != 0 ? strange_address() : memory().address();
        auto* const made =
            aclCreateTensor(shape.data(), shape.size(), dtype, strides.empty() ? nullptr : strides.data(), offset,
                            format, storage.data(), storage.size(), address);
        if (made == nullptr) return nullptr;
        are_small_ = are_small_ && is_small(shape);
        tensors_.push_back(made);
        return made;
    }

    test::Shape dims(std::size_t rank) {
        test::Shape values(rank);
        for (auto& value : values) value = input_.integer();
        return values;
    }

    static bool is_small(const test::Shape& shape) {
        std::int64_t product = 1;
        for (const auto size : shape) {
            if (size < -kMostElements || size > kMostElements) return false;
            product *= size;
            if (product < -kMostElements || product > kMostElements) return false;
        }
        return true;
    }

    const test::Memory& memory() const { return Device::instance().tensors[tensors_.size() % kMostTensors]; }

    void* strange_address() {
        static std::array<std::uint64_t, 64> host{};
        auto* const start = static_cast<char*>(memory().address());
        switch (input_.byte() % 8) {
            case 0:
                return nullptr;
            case 1:
                return host.data();
            case 2:
                return start + kBytesOfTensor - input_.byte();
            case 3:
                return reinterpret_cast<void*>(input_.integer());
            case 4:
                return start + kBytesOfTensor + 4096;
            default:
                return start + input_.byte();
        }
    }

    Input& input_;
    const unsigned results_ = input_.byte();
    // Rare, because a null pointer hides the rest of the call.
    const bool has_null_size_ = results_ % 32 == 1;
    const bool has_null_executor_ = results_ % 32 == 2;
    bool are_small_ = true;
    std::vector<aclTensor*> tensors_;
};

// Operations on an executor between the phases, as bits.
enum : unsigned {
    kRepeat = 1,
    kDestroyTensors = 2,
    kOtherAddress = 4,
    kDestroy = 8,
    kLittleWorkspace = 16,
    kTwice = 32
};

void use(Input& input, Arguments& arguments, test::PhaseTwo phase_two) {
    const unsigned what = input.byte();
    auto* const executor = arguments.executor;
    const bool is_repeatable = (what & kRepeat) != 0 && aclSetAclOpExecutorRepeatable(executor) == 0;
    if ((what & kOtherAddress) != 0) {
        auto* const address = Device::instance().tensors[input.byte() % kMostTensors].address();
        if (auto* const tensor = arguments.any()) aclSetTensorAddr(executor, input.byte(), tensor, address);
    }
    if ((what & kDestroyTensors) != 0) arguments.destroy();
    if ((what & kDestroy) != 0) aclDestroyAclOpExecutor(executor);
    const auto& device = Device::instance();
    const auto size = arguments.workspace_size - ((what & kLittleWorkspace) != 0 && arguments.workspace_size > 0);
    bool is_launched = false;
    if (arguments.are_small() && arguments.workspace_size <= kMostWorkspace) {
        for (unsigned count = 0; count < ((what & kTwice) != 0 ? 2u : 1u); ++count) {
            is_launched = phase_two(device.workspace.address(), size, executor, device.stream.handle) == 0;
        }
        device.stream.wait();
    }
    if (is_repeatable || !is_launched) aclDestroyAclOpExecutor(executor);
}

template <class... Parameters>
void call(Input& input, aclnnStatus (*phase_one)(Parameters...), test::PhaseTwo phase_two) {
    Arguments arguments(input);
    const std::tuple<Parameters...> all{arguments.next<Parameters>()...};
    const auto status = std::apply(phase_one, all);
    if (status == 0 && arguments.executor != nullptr) {
        use(input, arguments, phase_two);
    } else if (status != 0) {
        require(arguments.workspace_size == Arguments::kUntouched, "a refusal wrote workspaceSize");
    } else {
        require(arguments.lack_results(), "a call was accepted without an executor");
    }
}

// The operators are numbered as in tests/fuzz.py, which finds them in CANN's headers.
#define OPERATOR(name) [](Input& input) { call(input, name##GetWorkspaceSize, name); },
constexpr void (*kCalls[])(Input&) = {OPERATORS};

void require_nothing_alive() {
    const std::string stats = host_npu_stats_json();
    for (const std::string kind : {"aclTensor", "aclOpExecutor"}) {
        const auto at = stats.find('"' + kind + "\": ");
        require(at == std::string::npos || stats[at + kind.size() + 4] == '0', "something is alive at the end");
    }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    fuzz::require(aclInit(nullptr) == 0 && aclnnInit(nullptr) == 0 && aclrtSetDevice(0) == 0, "no device");
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    constexpr int kMostCalls = 8;
    fuzz::Input input(data, size);
    fuzz::Device::instance().fill(input.byte());
    for (int count = 0; count < kMostCalls && !input.at_end(); ++count) {
        const unsigned which = input.byte();
        const auto start = input.position();
        // The upper bits repeat the call, which may then hit the cache of phase one.
        for (unsigned repeats = 0; repeats <= which / 64; ++repeats) {
            input.go_back_to(start);
            fuzz::kCalls[which % 64 % std::size(fuzz::kCalls)](input);
        }
    }
    aclGetRecentErrMsg();
    fuzz::require_nothing_alive();
    return 0;
}
