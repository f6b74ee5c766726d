// Reading and writing views of any strides, in blocks of consecutive elements.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "nnopbase/call.h"
#include "opapi/element.h"

namespace host_npu {

// The number of elements that kernels process at once: a few kilobytes, which fit in the L1 cache.
inline constexpr std::int64_t kBlock = 1024;

// Loads the element at an address of any alignment. A byte that is neither 0 nor 1 is not a valid bool in C++.
template <class Stored>
Stored load(const std::byte* from) {
    if constexpr (std::is_same_v<Stored, bool>) {
        return *from != std::byte{0};
    } else {
        Stored stored;
        std::memcpy(&stored, from, sizeof stored);
        return stored;
    }
}

// Iterates over the elements of a tensor, broadcast to a shape, in row-major order.
class Elements {
  public:
    Elements(const HostTensor& tensor, const Dims& shape);
    explicit Elements(const HostTensor& tensor) : Elements(tensor, tensor->shape) {}

    // Reads the next `count` elements as Values.
    template <class Value>
    void read(Value* to, std::int64_t count) {
        visit(dtype_, [&]<class Stored>(Stored) { read_stored<Stored>(to, count); });
    }

    template <class Value>
    void write(const Value* from, std::int64_t count) {
        visit(dtype_, [&]<class Stored>(Stored) { write_stored<Stored>(from, count); });
    }

    // The same for callers that know the stored type.
    template <class Stored, class Value>
    void read_stored(Value* to, std::int64_t count) {
        runs(count, [&](const std::byte* from, std::int64_t step, std::int64_t length) {
            // The usual step is passed as a constant, so that the compiler vectorizes the loop.
            if (step == sizeof(Stored)) {
                convert_run<Value, Stored>(from, sizeof(Stored), to, length);
            } else {
                convert_run<Value, Stored>(from, step, to, length);
            }
            to += length;
        });
    }

    template <class Stored, class Value>
    void write_stored(const Value* from, std::int64_t count) {
        runs(count, [&](std::byte* to, std::int64_t step, std::int64_t length) {
            if (step == sizeof(Stored)) {
                store_run<Stored>(from, to, sizeof(Stored), length);
            } else {
                store_run<Stored>(from, to, step, length);
            }
            from += length;
        });
    }

  private:
    template <class Value, class Stored>
    static inline void convert_run(const std::byte* from, std::int64_t step, Value* to, std::int64_t length) {
        for (std::int64_t index = 0; index < length; ++index) {
            to[index] = convert<Value>(load<Stored>(from + index * step));
        }
    }

    template <class Stored, class Value>
    static inline void store_run(const Value* from, std::byte* to, std::int64_t step, std::int64_t length) {
        for (std::int64_t index = 0; index < length; ++index) {
            const auto stored = convert<Stored>(from[index]);
            std::memcpy(to + index * step, &stored, sizeof stored);
        }
    }

    // Calls `visit_run(address, bytes between elements, elements)` for each run of the next `count` elements.
    template <class VisitRun>
    void runs(std::int64_t count, const VisitRun& visit_run) {
        while (count > 0) {
            const auto length = std::min(count, sizes_[0] - at_[0]);
            visit_run(position_, strides_[0], length);
            count -= length;
            advance(length);
        }
    }

    void advance(std::int64_t length);

    std::byte* position_;
    aclDataType dtype_;
    // Innermost first; dimensions that form one run of memory are merged. Strides are in bytes.
    std::size_t rank_ = 0;
    std::array<std::int64_t, Dims::kMaxRank> sizes_;
    std::array<std::int64_t, Dims::kMaxRank> strides_;
    std::array<std::int64_t, Dims::kMaxRank> at_{};
};

// Returns all elements of a tensor in row-major order.
template <class Value>
std::vector<Value> read_all(const HostTensor& tensor) {
    std::vector<Value> values(static_cast<std::size_t>(tensor->numel()));
    if (!values.empty()) Elements(tensor).read(values.data(), static_cast<std::int64_t>(values.size()));
    return values;
}

template <class Value>
void write_all(const HostTensor& tensor, const std::vector<Value>& values) {
    if (!values.empty()) Elements(tensor).write(values.data(), static_cast<std::int64_t>(values.size()));
}

void fill(const HostTensor& tensor, float value);

// Returns the value of a scalar in single precision. A null pointer is refused with the name of the argument.
float number(const char* name, const aclScalar* scalar);

// Rounds to a kernel's data type, where it differs from the dtype of the tensor that the result is cast to.
void round_to(aclDataType dtype, float* values, std::int64_t count);

// out[i] = function(inputs[i]...), computed in float32 for inputs that broadcast to out's shape. The result is rounded
// to `kernel_dtype` and then cast to out's dtype.
template <class Function, class... Inputs>
void map(const HostTensor& out, aclDataType kernel_dtype, const Function& function, const Inputs&... inputs) {
    const auto numel = out->numel();
    std::array<Elements, sizeof...(Inputs)> sources{Elements(inputs, out->shape)...};
    Elements result(out);
    std::array<std::array<float, kBlock>, sizeof...(Inputs)> blocks;
    std::array<float, kBlock> block;
    for (std::int64_t done = 0; done < numel; done += kBlock) {
        const auto count = std::min(kBlock, numel - done);
        for (std::size_t index = 0; index < sources.size(); ++index) sources[index].read(blocks[index].data(), count);
        [&]<std::size_t... index>(std::index_sequence<index...>) {
            for (std::int64_t element = 0; element < count; ++element) {
                block[element] = function(blocks[index][element]...);
            }
        }(std::index_sequence_for<Inputs...>{});
        if (out->dtype != kernel_dtype) round_to(kernel_dtype, block.data(), count);
        result.write(block.data(), count);
    }
}

// The sum of function(inputs[i]...) over `shape`: in float32 within a block, and across blocks as exact as the device's
// tree.
template <class Function, class... Inputs>
float map_sum(const Dims& shape, const Function& function, const Inputs&... inputs) {
    const auto numel = shape.numel();
    std::array<Elements, sizeof...(Inputs)> sources{Elements(inputs, shape)...};
    std::array<std::array<float, kBlock>, sizeof...(Inputs)> blocks;
    double total = 0;
    for (std::int64_t done = 0; done < numel; done += kBlock) {
        const auto count = std::min(kBlock, numel - done);
        for (std::size_t index = 0; index < sources.size(); ++index) sources[index].read(blocks[index].data(), count);
        float sum = 0;
        [&]<std::size_t... index>(std::index_sequence<index...>) {
            for (std::int64_t element = 0; element < count; ++element) sum += function(blocks[index][element]...);
        }(std::index_sequence_for<Inputs...>{});
        total += sum;
    }
    return static_cast<float>(total);
}

}  // namespace host_npu
