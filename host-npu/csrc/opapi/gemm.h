// Matrix products in float32.
#pragma once

#include <cstdint>

namespace host_npu {

// Element (row, column) is at data[row * row_stride + column * column_stride].
struct Matrix {
    const float* data;
    std::int64_t row_stride;
    std::int64_t column_stride;

    Matrix transposed() const { return {data, column_stride, row_stride}; }
    Matrix from(std::int64_t row, std::int64_t column) const {
        return {data + row * row_stride + column * column_stride, row_stride, column_stride};
    }
};

// A matrix with contiguous rows.
inline Matrix rows_of(const float* data, std::int64_t columns) { return {data, columns, 1}; }

// out (rows x columns, with row stride `out_stride`) += left (rows x depth) * right (depth x columns).
void multiply_add(const Matrix& left, const Matrix& right, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                  float* out, std::int64_t out_stride);

}  // namespace host_npu
