// What an aclTensor is made of.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <vector>

#include "aclnn/acl_meta.h"
#include "runtime/device.h"

namespace host_npu {

// Up to 25 sizes or strides, the most that CANN's framework allows.
class Dims {
  public:
    static constexpr std::size_t kMaxRank = 25;

    Dims() = default;
    Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
    explicit Dims(std::span<const std::int64_t> values) { assign(values); }
    Dims(const Dims& other) { assign(other); }
    Dims& operator=(const Dims& other) {
        if (this != &other) assign(other);
        return *this;
    }

    std::size_t rank() const { return rank_; }
    std::int64_t operator[](std::size_t index) const { return values_[index]; }
    std::int64_t& operator[](std::size_t index) { return values_[index]; }
    std::int64_t back() const { return values_[rank_ - 1]; }
    const std::int64_t* begin() const { return values_.data(); }
    const std::int64_t* end() const { return begin() + rank_; }
    operator std::span<const std::int64_t>() const { return {begin(), rank_}; }

    bool operator==(const Dims& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

    void push_back(std::int64_t value) {
        if (rank_ == kMaxRank) throw std::length_error("a tensor has at most 25 dimensions");
        values_[rank_++] = value;
    }

    // The product of all sizes.
    std::int64_t numel() const {
        std::int64_t product = 1;
        for (const auto size : *this) product *= size;
        return product;
    }

    // A size is 0. A scalar is not empty.
    bool empty() const { return std::find(begin(), end(), 0) != end(); }

  private:
    void assign(std::span<const std::int64_t> values) {
        if (values.size() > kMaxRank) throw std::length_error("a tensor has at most 25 dimensions");
        rank_ = values.size();
        std::copy(values.begin(), values.end(), values_.begin());
    }

    std::size_t rank_ = 0;
    std::array<std::int64_t, kMaxRank> values_;
};

// The strides of a contiguous tensor.
inline Dims contiguous_strides(const Dims& shape) {
    Dims strides = shape;
    std::int64_t stride = 1;
    for (auto index = shape.rank(); index-- > 0;) {
        strides[index] = stride;
        stride *= shape[index];
    }
    return strides;
}

// A view of a storage.
struct Layout {
    Dims shape;
    Dims strides;
    Dims storage_shape;
    std::int64_t offset = 0;
    aclDataType dtype = ACL_DT_UNDEFINED;
    aclFormat format = ACL_FORMAT_ND;

    bool empty() const { return shape.empty(); }
    std::int64_t numel() const { return shape.numel(); }
    bool contiguous() const {
        std::int64_t stride = 1;
        for (auto index = shape.rank(); index-- > 0;) {
            if (shape[index] != 1 && strides[index] != stride) return false;
            stride *= shape[index];
        }
        return true;
    }
};

}  // namespace host_npu

struct aclTensor {
    bool alive = false;
    std::uint64_t generation = 0;
    host_npu::Layout layout;
    void* storage = nullptr;
};

struct aclTensorList {
    bool alive = false;
    std::uint64_t generation = 0;
    std::vector<aclTensor*> members;
};
