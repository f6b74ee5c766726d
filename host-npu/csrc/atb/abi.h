// The part of ATB's published interface that torch_npu calls. Layouts and the order of virtual functions must match.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl_base.h"
#include "ascendcl/device.h"

namespace atb {

using Status = std::int32_t;

struct Dims {
    std::array<std::int64_t, 8> dims;
    std::uint64_t rank = 0;
};

struct TensorDesc {
    aclDataType dtype = ACL_DT_UNDEFINED;
    aclFormat format = ACL_FORMAT_UNDEFINED;
    Dims shape;
};

// In device memory, in host memory, or absent.
struct Tensor {
    TensorDesc desc;
    void* device_data = nullptr;
    void* host_data = nullptr;
    std::uint64_t size = 0;
};

template <class Member>
class SVector {
  public:
    const Member* begin() const { return heap_ ? heap_ : storage_.data(); }
    const Member* end() const { return begin() + size_; }
    std::size_t size() const { return size_; }
    void push_back(const Member& member) { storage_.at(size_++) = member; }

  private:
    std::size_t capacity_ = 0;
    std::size_t size_ = 0;
    std::array<Member, 65> storage_;
    Member* heap_ = nullptr;
};

struct VariantPack {
    SVector<Tensor> inputs;
    SVector<Tensor> outputs;
};

enum class ExecuteType : int { kNormal };
enum class LaunchMode : int { kKernel };

class Context {
  public:
    virtual ~Context() = default;
    virtual Status SetExecuteStream(void* stream) = 0;
    virtual void* GetExecuteStream() const = 0;
    virtual Status SetAsyncTilingCopyStatus(bool enable) = 0;
    virtual bool GetAsyncTilingCopyStatus() const = 0;
    virtual Status SetExecuteStreams(const std::vector<void*>& streams) = 0;
    virtual std::vector<void*> GetExecuteStreams() = 0;
    virtual Status SetExecuteType(ExecuteType type) = 0;
    virtual ExecuteType GetExecuteType() = 0;
    virtual Status SetLaunchMode(LaunchMode mode) = 0;
    virtual LaunchMode GetLaunchMode() = 0;
};

class Operation {
  public:
    virtual ~Operation() = default;
    virtual std::string GetName() const = 0;
    virtual Status InferShape(const SVector<TensorDesc>& inputs, SVector<TensorDesc>& outputs) const = 0;
    virtual std::uint32_t GetInputNum() const = 0;
    virtual std::uint32_t GetOutputNum() const = 0;
    virtual Status Setup(const VariantPack& tensors, std::uint64_t& workspace_size, Context* context) = 0;
    virtual Status Execute(const VariantPack& tensors, std::uint8_t* workspace, std::uint64_t workspace_size,
                           Context* context) = 0;
};

template <class Parameters>
HOST_NPU_EXPORT Status CreateOperation(const Parameters& parameters, Operation** operation);

namespace infer {

// Further members are unused or belong to other kinds.
struct RmsNormParam {
    enum class Kind : int { kNorm = 1 };
    struct Norm {
        enum class Quantization : int { kInt8 = 2 };
        Quantization quantization;
        float epsilon;
        double layer_norm_epsilon;
    };
    Kind kind;
    Norm norm;
};

// Further members belong to other kinds.
struct ElewiseParam {
    enum class Kind : int { kQuantPerChannel = 17 };
    Kind kind;
};

struct GroupTopkParam {
    std::int32_t groups;
    std::int32_t k;
    std::uint16_t has_sums;
    std::uint16_t n;
};

struct LinearParam {
    bool transpose_a;
    bool transpose_b;
    bool has_bias;
    aclDataType out_dtype;
    bool accumulates;
};

// The format of a KV cache.
enum class Cache : int { kKeysAndValues, kKeys, kTiled };

struct ReshapeAndCacheParam {
    int compression;
    Cache cache;
};

struct RopeParam {
    std::int32_t rotary_coefficient;
    std::int32_t cos_format;
};

struct PagedAttentionParam {
    enum class Mask : int { kNone, kNorm, kAlibi, kSpec };
    std::int32_t heads;
    float scale;
    std::int32_t kv_heads;
    Mask mask;
    bool has_batch_status;
    int quantization;
    aclDataType out_dtype;
    bool has_quantization_offset;
    int compression;
    // Whether sequences have several queries.
    int has_lengths;
    int scale_type;
    int layout;
    std::uint32_t mla_value_size;
};

struct SelfAttentionParam {
    enum class Mask : int { kNone, kNorm, kAlibi, kNormCompressed, kCausal = 9 };
    enum class Kind : int { kFlash, kEncoder, kDecoder, kPagedEncoder, kPrefixEncoder };
    int quantization;
    aclDataType out_dtype;
    std::int32_t heads;
    std::int32_t kv_heads;
    float query_scale;
    float scale;
    bool has_batch_status;
    std::uint32_t is_triangular;
    Kind kind;
    int kernel_type;
    int clamp_type;
    float clamp_min;
    float clamp_max;
    Mask mask;
    int cache;
    int scale_type;
    int layout;
    std::uint32_t mla_value_size;
    std::int8_t cache_type;
    std::uint32_t window;
};

}  // namespace infer
}  // namespace atb
