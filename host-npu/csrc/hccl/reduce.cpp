#include "hccl/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "ascendcl/device.h"
#include "opapi/element.h"

namespace host_npu::hccl {
namespace {

// The number of elements reduced at a time, which fit into the cache.
constexpr std::size_t kBlock = 1024;

template <class Element>
using Accumulator = std::conditional_t<kIs16Bit<Element>, float, Element>;

// Propagates NaN from either argument.
struct Largest {
    template <class Value>
    Value operator()(Value first, Value second) const {
        return second > first || second != second ? second : first;
    }
};

struct Smallest {
    template <class Value>
    Value operator()(Value first, Value second) const {
        return second < first || second != second ? second : first;
    }
};

template <class Element, class Combine>
void reduce(const std::vector<const std::byte*>& sources, std::byte* target, std::size_t count, Combine combine) {
    using Value = Accumulator<Element>;
    std::array<Value, kBlock> combined;
    std::array<Element, kBlock> elements;
    for (std::size_t start = 0; start < count; start += kBlock) {
        const auto size = std::min(kBlock, count - start);
        const auto offset = start * sizeof(Element);
        for (std::size_t source = 0; source < sources.size(); ++source) {
            std::memcpy(elements.data(), sources[source] + offset, size * sizeof(Element));
            if (source == 0) {
                for (std::size_t index = 0; index < size; ++index) combined[index] = convert<Value>(elements[index]);
            } else {
                for (std::size_t index = 0; index < size; ++index) {
                    combined[index] = combine(combined[index], convert<Value>(elements[index]));
                }
            }
        }
        for (std::size_t index = 0; index < size; ++index) elements[index] = convert<Element>(combined[index]);
        std::memcpy(target + offset, elements.data(), size * sizeof(Element));
    }
}

template <class Element>
void reduce(HcclReduceOp op, const std::vector<const std::byte*>& sources, std::byte* target, std::size_t bytes) {
    const auto count = bytes / sizeof(Element);
    using Value = Accumulator<Element>;
    switch (op) {
        case HCCL_REDUCE_SUM:
            return reduce<Element>(sources, target, count,
                                   [](Value first, Value second) { return static_cast<Value>(first + second); });
        case HCCL_REDUCE_PROD:
            return reduce<Element>(sources, target, count,
                                   [](Value first, Value second) { return static_cast<Value>(first * second); });
        case HCCL_REDUCE_MAX:
            return reduce<Element>(sources, target, count, Largest{});
        case HCCL_REDUCE_MIN:
            return reduce<Element>(sources, target, count, Smallest{});
        default:
            throw std::invalid_argument("there is no such reduction");
    }
}

}  // namespace

bool can_reduce(HcclDataType dtype, HcclReduceOp op) {
    const auto chip = soc();
    const bool is_older = chip == Soc::Ascend910 || chip == Soc::Ascend310P;
    switch (dtype) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_FP32:
            return true;
        case HCCL_DATA_TYPE_INT64:
            return chip != Soc::Ascend310P;
        case HCCL_DATA_TYPE_INT16:
            if (chip == Soc::Ascend310P) return op == HCCL_REDUCE_SUM;
            return !is_older && op != HCCL_REDUCE_PROD;
        case HCCL_DATA_TYPE_BFP16:
            return !is_older && op != HCCL_REDUCE_PROD;
        case HCCL_DATA_TYPE_UINT64:
        case HCCL_DATA_TYPE_FP64:
            return chip == Soc::Ascend950;
        default:
            return false;
    }
}

void reduce(HcclDataType dtype, HcclReduceOp op, const std::vector<const std::byte*>& sources, std::byte* target,
            std::size_t bytes) {
    struct Type {
        HcclDataType dtype;
        void (*reduce)(HcclReduceOp, const std::vector<const std::byte*>&, std::byte*, std::size_t);
    };
    static constexpr Type types[] = {
        {HCCL_DATA_TYPE_INT8, reduce<std::int8_t>},     {HCCL_DATA_TYPE_INT16, reduce<std::int16_t>},
        {HCCL_DATA_TYPE_INT32, reduce<std::int32_t>},   {HCCL_DATA_TYPE_INT64, reduce<std::int64_t>},
        {HCCL_DATA_TYPE_FP16, reduce<Float16>},         {HCCL_DATA_TYPE_FP32, reduce<float>},
        {HCCL_DATA_TYPE_FP64, reduce<double>},          {HCCL_DATA_TYPE_BFP16, reduce<BFloat16>},
        {HCCL_DATA_TYPE_UINT64, reduce<std::uint64_t>},
    };
    const auto* const found = std::ranges::find(types, dtype, &Type::dtype);
    if (found == std::end(types)) throw std::invalid_argument("elements of this type cannot be reduced");
    found->reduce(op, sources, target, bytes);
}

}  // namespace host_npu::hccl
