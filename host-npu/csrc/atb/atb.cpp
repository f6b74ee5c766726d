// libatb, a library of transformer operators next to CANN. torch_npu creates operations on the caller's thread, where
// unsupported ones are refused.
#include <stdexcept>
#include <string>
#include <vector>

#include "atb/computed.h"
#include "host_npu_formulas/scalar_type.h"

namespace atb {
std::string not_simulated(const std::string& name) {
    return "the host NPU does not simulate ATB's " + name + "; python -m host_npu --list shows what is simulated";
}

namespace {

// A failure on the thread of torch_npu's queue would end the queue; the next call raises it instead.
int refuse_function(const char* name) {
    if (host_npu::refuse_after_queue(not_simulated(name))) return 0;
    throw std::runtime_error(not_simulated(name));
}

// A context, of which operations use only the stream.
class StreamContext : public Context {
  public:
    Status SetExecuteStream(void* stream) override {
        stream_ = stream;
        return 0;
    }
    void* GetExecuteStream() const override { return stream_; }
    Status SetAsyncTilingCopyStatus(bool) override { return 0; }
    bool GetAsyncTilingCopyStatus() const override { return false; }
    Status SetExecuteStreams(const std::vector<void*>& streams) override {
        stream_ = streams.at(0);
        return 0;
    }
    std::vector<void*> GetExecuteStreams() override { return {stream_}; }
    Status SetExecuteType(ExecuteType) override { return 0; }
    ExecuteType GetExecuteType() override { return ExecuteType::kNormal; }
    Status SetLaunchMode(LaunchMode) override { return 0; }
    LaunchMode GetLaunchMode() override { return LaunchMode::kKernel; }

  private:
    void* stream_ = nullptr;
};

}  // namespace

HOST_NPU_EXPORT int CreateContext(Context** context) {
    *context = new StreamContext;
    return 0;
}

HOST_NPU_EXPORT int DestroyContext(Context* context) {
    delete context;
    return 0;
}

HOST_NPU_EXPORT int DestroyOperation(Operation* operation) {
    delete operation;
    return 0;
}

struct HOST_NPU_EXPORT Utils {
    static std::uint64_t GetTensorSize(const Tensor& tensor);
};

std::uint64_t Utils::GetTensorSize(const Tensor& tensor) {
    const auto dtype = host_npu::scalar_type(tensor.desc.dtype);
    std::uint64_t size = dtype ? c10::elementSize(*dtype) : 0;
    for (std::uint64_t dim = 0; dim < tensor.desc.shape.rank; ++dim) size *= tensor.desc.shape.dims[dim];
    return size;
}

}  // namespace atb

// Functions that torch_npu looks up by name.
#define HOST_NPU_FUNCTION(name)                                                                     \
    extern "C" HOST_NPU_EXPORT int name##GetWorkspaceSize() { return atb::refuse_function(#name); } \
    extern "C" HOST_NPU_EXPORT int name() { return atb::refuse_function(#name); }
#include "atb_functions.inc"
#undef HOST_NPU_FUNCTION
