#include "opapi/elements.h"

#include "nnopbase/containers.h"
#include "nnopbase/status.h"

namespace host_npu {

// From the innermost dimension outward: expanded dimensions get stride 0, and dimensions without a gap are merged.
Elements::Elements(const HostTensor& tensor, const Dims& shape) : position_(tensor.data), dtype_(tensor->dtype) {
    const auto size = static_cast<std::int64_t>(item_size(dtype_));
    const auto missing = shape.rank() - tensor->shape.rank();
    for (auto index = shape.rank(); index-- > 0;) {
        if (shape[index] == 1) continue;
        const bool repeated = index < missing || tensor->shape[index - missing] == 1;
        const auto stride = repeated ? 0 : tensor->strides[index - missing] * size;
        if (rank_ > 0 && stride == strides_[rank_ - 1] * sizes_[rank_ - 1]) {
            sizes_[rank_ - 1] *= shape[index];
        } else {
            sizes_[rank_] = shape[index];
            strides_[rank_++] = stride;
        }
    }
    if (rank_ == 0) {
        sizes_[0] = 1;
        strides_[0] = size;
        rank_ = 1;
    }
}

void Elements::advance(std::int64_t length) {
    at_[0] += length;
    position_ += length * strides_[0];
    for (std::size_t index = 0; at_[index] == sizes_[index] && index + 1 < rank_; ++index) {
        position_ += strides_[index + 1] - at_[index] * strides_[index];
        at_[index] = 0;
        ++at_[index + 1];
    }
}

void fill(const HostTensor& tensor, float value) {
    if (tensor->empty()) return;
    Elements elements(tensor);
    std::array<float, kBlock> block;
    block.fill(value);
    const auto numel = tensor->numel();
    for (std::int64_t done = 0; done < numel; done += kBlock) {
        elements.write(block.data(), std::min(kBlock, numel - done));
    }
}

void round_to(aclDataType dtype, float* values, std::int64_t count) {
    visit(dtype, [&]<class Rounded>(Rounded) {
        if constexpr (kIs16Bit<Rounded>) {
            for (std::int64_t index = 0; index < count; ++index) values[index] = widen(convert<Rounded>(values[index]));
        }
    });
}

float number(const char* name, const aclScalar* scalar) {
    require(scalar != nullptr, kNullPointer, name, " is null");
    return visit(scalar->dtype, [&]<class Given>(Given) { return convert<float>(load<Given>(scalar->value.data())); });
}

}  // namespace host_npu
