// Blocked as in "Anatomy of High-Performance Matrix Multiplication" (Goto and van de Geijn): panels of both matrices
// are packed so that the innermost loop reads them in order and keeps its small block of the result in registers.
#include "opapi/gemm.h"

#include <algorithm>
#include <vector>

namespace host_npu {
namespace {

constexpr std::int64_t kTileRows = 6;
constexpr std::int64_t kTileColumns = 16;
constexpr std::int64_t kPanelRows = 16 * kTileRows;
constexpr std::int64_t kPanelColumns = 128 * kTileColumns;
constexpr std::int64_t kPanelDepth = 256;

constexpr std::int64_t kLanes = 8;
constexpr std::int64_t kVectors = kTileColumns / kLanes;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
// The same type for memory aligned only to a float.
using StoredLanes = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

// One binary for all x86-64 machines: the loader picks the version that the machine can run. On aarch64 all machines
// have the same vectors.
#if defined(__clang__)
#define HOST_NPU_FOR_WIDE_VECTORS
#elif defined(__x86_64__) && !defined(__SANITIZE_THREAD__)  // TSan is not ready when the loader picks.
#define HOST_NPU_FOR_WIDE_VECTORS \
    __attribute__((target_clones("arch=x86-64-v3", "default"), optimize("fp-contract=fast")))
#else
#define HOST_NPU_FOR_WIDE_VECTORS __attribute__((optimize("fp-contract=fast")))
#endif

// out (6 x 16, contiguous) = left (depth x 6, packed) * right (depth x 16, packed)
HOST_NPU_FOR_WIDE_VECTORS
void multiply_tile(const float* left, const float* right, std::int64_t depth, float* out) {
    Lanes sums[kTileRows][kVectors] = {};
    for (std::int64_t step = 0; step < depth; ++step) {
        const auto* const stored = reinterpret_cast<const StoredLanes*>(right + step * kTileColumns);
        const Lanes lanes[kVectors] = {stored[0], stored[1]};
        const float* const column = left + step * kTileRows;
#pragma GCC unroll 6
        for (std::int64_t row = 0; row < kTileRows; ++row) {
#pragma GCC unroll 2
            for (std::int64_t vector = 0; vector < kVectors; ++vector) sums[row][vector] += lanes[vector] * column[row];
        }
    }
    auto* const stored = reinterpret_cast<StoredLanes*>(out);
#pragma GCC unroll 6
    for (std::int64_t row = 0; row < kTileRows; ++row) {
        for (std::int64_t vector = 0; vector < kVectors; ++vector) stored[row * kVectors + vector] = sums[row][vector];
    }
}

// Packs one group without missing rows. Strides of 1 are constants to the compiler.
template <std::int64_t group>
void pack_group(const float* from, std::int64_t row_stride, std::int64_t column_stride, std::int64_t depth, float* to) {
    if (row_stride == 1) {
        for (std::int64_t step = 0; step < depth; ++step)
            std::copy_n(from + step * column_stride, group, to + step * group);
        return;
    }
    for (std::int64_t step = 0; step < depth; ++step) {
        for (std::int64_t row = 0; row < group; ++row)
            to[step * group + row] = from[row * row_stride + step * column_stride];
    }
}

// Copies rows x depth of `from`, in groups of rows stored side by side; missing rows are zero.
template <std::int64_t group>
void pack(const Matrix& from, std::int64_t rows, std::int64_t depth, float* to) {
    for (std::int64_t first = 0; first < rows; first += group, to += group * depth) {
        const float* const source = from.data + first * from.row_stride;
        const auto present = std::min(group, rows - first);
        if (present == group) {
            pack_group<group>(source, from.row_stride, from.column_stride, depth, to);
            continue;
        }
        std::fill_n(to, group * depth, 0.0f);
        for (std::int64_t step = 0; step < depth; ++step) {
            for (std::int64_t row = 0; row < present; ++row) {
                to[step * group + row] = source[row * from.row_stride + step * from.column_stride];
            }
        }
    }
}

// Inlined, so that the compiler unrolls it for constant sizes.
inline void add_tile(const float* tile, std::int64_t rows, std::int64_t columns, float* out, std::int64_t out_stride) {
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            out[row * out_stride + column] += tile[row * kTileColumns + column];
        }
    }
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

void multiply_add(const Matrix& left, const Matrix& right, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                  float* out, std::int64_t out_stride) {
    thread_local std::vector<float> left_panel;
    thread_local std::vector<float> right_panel;
    const auto panel_depth = std::min(depth, kPanelDepth);
    left_panel.resize(round_up(std::min(rows, kPanelRows), kTileRows) * panel_depth);
    right_panel.resize(round_up(std::min(columns, kPanelColumns), kTileColumns) * panel_depth);

    alignas(64) float tile[kTileRows * kTileColumns];
    for (std::int64_t column = 0; column < columns; column += kPanelColumns) {
        const auto panel_columns = std::min(kPanelColumns, columns - column);
        for (std::int64_t step = 0; step < depth; step += kPanelDepth) {
            const auto steps = std::min(kPanelDepth, depth - step);
            pack<kTileColumns>(right.from(step, column).transposed(), panel_columns, steps, right_panel.data());
            for (std::int64_t row = 0; row < rows; row += kPanelRows) {
                const auto panel_rows = std::min(kPanelRows, rows - row);
                pack<kTileRows>(left.from(row, step), panel_rows, steps, left_panel.data());
                for (std::int64_t c = 0; c < panel_columns; c += kTileColumns) {
                    const auto tile_columns = std::min(kTileColumns, panel_columns - c);
                    for (std::int64_t r = 0; r < panel_rows; r += kTileRows) {
                        multiply_tile(&left_panel[r * steps], &right_panel[c * steps], steps, tile);
                        float* const to = out + (row + r) * out_stride + column + c;
                        const auto tile_rows = std::min(kTileRows, panel_rows - r);
                        if (tile_rows == kTileRows && tile_columns == kTileColumns) {
                            add_tile(tile, kTileRows, kTileColumns, to, out_stride);
                        } else {
                            add_tile(tile, tile_rows, tile_columns, to, out_stride);
                        }
                    }
                }
            }
        }
    }
}

}  // namespace host_npu
