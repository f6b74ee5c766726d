// libatb, the library of transformer operators beside CANN, of which none is simulated: torch_npu makes an operation in
// the thread of the caller, and is told there.
#include <stdexcept>
#include <string>

#include "ascendcl/device.h"

#define HOST_NPU_FOUR(name)             \
    virtual int name##1() { return 0; } \
    virtual int name##2() { return 0; } \
    virtual int name##3() { return 0; } \
    virtual int name##4() { return 0; }

namespace atb {

class Operation;
struct Tensor;

namespace infer {
struct ElewiseParam;
struct GroupTopkParam;
struct LinearParam;
struct PagedAttentionParam;
struct ReshapeAndCacheParam;
struct RmsNormParam;
struct RopeParam;
struct SelfAttentionParam;
}  // namespace infer

namespace {

std::string not_simulated(const std::string& name) {
    return "the host NPU does not simulate ATB's " + name + "; python -m host_npu --list shows what it does";
}

// In torch_npu's queue a failure would end the queue.
int refuse_function(const char* name) {
    if (host_npu::refuse_after_queue(not_simulated(name))) return 0;
    throw std::runtime_error(not_simulated(name));
}

}  // namespace

// torch_npu makes one before it asks for an operation, and tells it the stream: by virtual functions that no published
// header lists, so there are more than enough, which do nothing.
class Context {
  public:
    virtual int first() { return 0; }
    HOST_NPU_FOUR(a) HOST_NPU_FOUR(b) HOST_NPU_FOUR(c) HOST_NPU_FOUR(d) HOST_NPU_FOUR(e) virtual ~Context() = default;
};

HOST_NPU_EXPORT int CreateContext(Context** context) {
    *context = new Context;
    return 0;
}

HOST_NPU_EXPORT int DestroyContext(Context* context) {
    delete context;
    return 0;
}

template <class Parameters>
HOST_NPU_EXPORT int CreateOperation(const Parameters&, Operation**);

#define HOST_NPU_OPERATION(name)                                                                      \
    template <>                                                                                       \
    HOST_NPU_EXPORT int CreateOperation<infer::name##Param>(const infer::name##Param&, Operation**) { \
        throw std::runtime_error(not_simulated(#name));                                               \
    }
HOST_NPU_OPERATION(Elewise)
HOST_NPU_OPERATION(GroupTopk)
HOST_NPU_OPERATION(Linear)
HOST_NPU_OPERATION(PagedAttention)
HOST_NPU_OPERATION(ReshapeAndCache)
HOST_NPU_OPERATION(RmsNorm)
HOST_NPU_OPERATION(Rope)
HOST_NPU_OPERATION(SelfAttention)
#undef HOST_NPU_OPERATION

HOST_NPU_EXPORT int DestroyOperation(Operation*) { return 0; }

struct HOST_NPU_EXPORT Utils {
    static unsigned long GetTensorSize(const Tensor&);
};

unsigned long Utils::GetTensorSize(const Tensor&) { return 0; }

}  // namespace atb

// Functions that torch_npu looks up by their names.
#define HOST_NPU_FUNCTION(name)                                                                     \
    extern "C" HOST_NPU_EXPORT int name##GetWorkspaceSize() { return atb::refuse_function(#name); } \
    extern "C" HOST_NPU_EXPORT int name() { return atb::refuse_function(#name); }
#include "atb_functions.inc"
#undef HOST_NPU_FUNCTION
