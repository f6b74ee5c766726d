// The definition of aclTensor.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "aclnn/acl_meta.h"
#include "ascendcl/device.h"

namespace host_npu {

// Up to 25 sizes or strides, the limit of CANN's framework. Up to eight are stored inline.
class Dims {
  public:
    static constexpr std::size_t kMaxRank = 25;

    Dims() = default;
    Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
    explicit Dims(std::span<const std::int64_t> values) {
        require_allowed(values.size());
        rank_ = values.size();
        if (rank_ > few_.size()) many_.resize(rank_);
        std::copy(values.begin(), values.end(), data());
    }

    std::size_t rank() const { return rank_; }
    std::int64_t operator[](std::size_t index) const { return begin()[index]; }
    std::int64_t& operator[](std::size_t index) { return data()[index]; }
    std::int64_t back() const { return (*this)[rank_ - 1]; }
    const std::int64_t* begin() const { return many_.empty() ? few_.data() : many_.data(); }
    const std::int64_t* end() const { return begin() + rank_; }
    operator std::span<const std::int64_t>() const { return {begin(), rank_}; }

    bool operator==(const Dims& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

    void push_back(std::int64_t value) {
        require_allowed(rank_ + 1);
        if (rank_ < few_.size()) {
            few_[rank_] = value;
        } else {
            if (many_.empty()) many_.assign(few_.begin(), few_.end());
            many_.push_back(value);
        }
        ++rank_;
    }

    // The product of the sizes.
    std::int64_t numel() const {
        std::int64_t product = 1;
        for (const auto size : *this) product *= size;
        return product;
    }

    // Whether any size is 0; false for a scalar.
    bool empty() const { return std::find(begin(), end(), 0) != end(); }

  private:
    static void require_allowed(std::size_t rank) {
        if (rank > kMaxRank) throw std::length_error("a tensor has at most 25 dimensions");
    }
    std::int64_t* data() { return many_.empty() ? few_.data() : many_.data(); }

    std::size_t rank_ = 0;
    std::array<std::int64_t, 8> few_{};
    // All values, if there are too many to store inline.
    std::vector<std::int64_t> many_;
};

// Returns the strides of a contiguous tensor.
inline Dims contiguous_strides(const Dims& shape) {
    Dims strides = shape;
    std::int64_t stride = 1;
    for (auto index = shape.rank(); index-- > 0;) {
        strides[index] = stride;
        stride *= shape[index];
    }
    return strides;
}

// Saturates instead of overflowing.
inline std::int64_t saturated_sum(std::int64_t one, std::int64_t other) {
    std::int64_t sum = 0;
    if (!__builtin_add_overflow(one, other, &sum)) return sum;
    return one < 0 ? std::numeric_limits<std::int64_t>::min() : std::numeric_limits<std::int64_t>::max();
}

inline std::int64_t saturated_product(std::int64_t one, std::int64_t other) {
    std::int64_t product = 0;
    if (!__builtin_mul_overflow(one, other, &product)) return product;
    return (one < 0) != (other < 0) ? std::numeric_limits<std::int64_t>::min()
                                    : std::numeric_limits<std::int64_t>::max();
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
    // The offsets of the first and the last element in the storage. Requires a view that is not empty.
    std::pair<std::int64_t, std::int64_t> reach() const {
        auto first = offset;
        auto last = offset;
        for (std::size_t index = 0; index < shape.rank(); ++index) {
            const auto extent = saturated_product(saturated_sum(shape[index], -1), strides[index]);
            auto& end = extent < 0 ? first : last;
            end = saturated_sum(end, extent);
        }
        return {first, last};
    }
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

    // Replaces the view by a contiguous one of another shape.
    void set_shape(const host_npu::Dims& shape) {
        layout.shape = shape;
        layout.strides = host_npu::contiguous_strides(shape);
    }
};

struct aclTensorList {
    bool alive = false;
    std::uint64_t generation = 0;
    std::vector<aclTensor*> members;
};
