// The graph operator Identity, with which torch_npu casts between formats.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "acl_op_compiler/graph_operators.h"
#include "ascendcl/device.h"
#include "nnopbase/dtype.h"
#include "nnopbase/tensor.h"

namespace host_npu {
namespace {

using Sizes = std::vector<std::int64_t>;

std::int64_t product(const Sizes& dims) {
    return std::accumulate(dims.begin(), dims.end(), std::int64_t{1}, saturated_product);
}

bool all_at_least(std::int64_t least, const Sizes& dims) {
    return std::ranges::all_of(dims, [=](std::int64_t size) { return size >= least; });
}

// A matrix, or several, in memory.
class Placement {
  public:
    explicit Placement(const aclTensorDesc& desc)
        : tiled_(desc.storage_format == ACL_FORMAT_FRACTAL_NZ),
          rows_(desc.dims.size() < 2 ? 1 : desc.dims[desc.dims.size() - 2]),
          columns_(desc.dims.empty() ? 1 : desc.dims.back()) {
        if (!tiled_) return;
        const auto* const tiles = &desc.storage_dims[desc.storage_dims.size() - 4];
        column_tiles_ = tiles[0];
        row_tiles_ = tiles[1];
        tile_rows_ = tiles[2];
        tile_columns_ = tiles[3];
    }

    static bool knows(const aclTensorDesc& desc) {
        if (!all_at_least(0, desc.dims)) return false;
        if (desc.storage_format != ACL_FORMAT_FRACTAL_NZ) {
            return desc.storage_format == desc.format && all_at_least(0, desc.storage_dims) &&
                   product(desc.storage_dims) == product(desc.dims);
        }
        return desc.dims.size() >= 2 && desc.storage_dims.size() == desc.dims.size() + 2 &&
               (product(desc.dims) == 0 || has_room(desc));
    }

    // Whether the tiles have a place for every element.
    static bool has_room(const aclTensorDesc& desc) {
        if (!all_at_least(1, desc.storage_dims)) return false;
        const Placement tiles(desc);
        const auto matrices = desc.dims.size() - 2;
        return std::equal(desc.dims.begin(), desc.dims.begin() + static_cast<std::ptrdiff_t>(matrices),
                          desc.storage_dims.begin()) &&
               saturated_product(tiles.row_tiles_, tiles.tile_rows_) >= tiles.rows_ &&
               saturated_product(tiles.column_tiles_, tiles.tile_columns_) >= tiles.columns_;
    }

    // Columns of tiles follow one another, in each of them its tiles from top to bottom.
    std::int64_t offset(std::int64_t matrix, std::int64_t row, std::int64_t column) const {
        if (!tiled_) return (matrix * rows_ + row) * columns_ + column;
        const auto tile = (matrix * column_tiles_ + column / tile_columns_) * row_tiles_ + row / tile_rows_;
        return (tile * tile_rows_ + row % tile_rows_) * tile_columns_ + column % tile_columns_;
    }

    std::int64_t rows() const { return rows_; }
    std::int64_t columns() const { return columns_; }

  private:
    bool tiled_;
    std::int64_t rows_;
    std::int64_t columns_;
    std::int64_t column_tiles_ = 0;
    std::int64_t row_tiles_ = 0;
    std::int64_t tile_rows_ = 0;
    std::int64_t tile_columns_ = 0;
};

void copy(const aclTensorDesc& from, const std::byte* source, const aclTensorDesc& to, std::byte* destination) {
    const auto size = item_size(to.type);
    const Placement read(from), write(to);
    // What is behind the last row and column of the tiles.
    std::memset(destination, 0, static_cast<std::size_t>(product(to.storage_dims)) * size);
    const auto matrices = product(to.dims) / (write.rows() * write.columns());
    for (std::int64_t matrix = 0; matrix < matrices; ++matrix) {
        for (std::int64_t row = 0; row < write.rows(); ++row) {
            for (std::int64_t column = 0; column < write.columns(); ++column) {
                std::memcpy(destination + static_cast<std::size_t>(write.offset(matrix, row, column)) * size,
                            source + static_cast<std::size_t>(read.offset(matrix, row, column)) * size, size);
            }
        }
    }
}

}  // namespace

std::optional<std::string> run_identity(const GraphCall& call) {
    if (call.inputs.size() != 1 || call.outputs.size() != 1) return "it has one input and one output";
    const auto& [from, source] = call.inputs[0];
    const auto& [to, destination] = call.outputs[0];
    if (from.type != to.type || from.dims != to.dims || item_size(to.type) == 0) {
        return "its output has another dtype or another shape than its input";
    }
    if (!Placement::knows(from) || !Placement::knows(to)) {
        return "its formats are " + std::to_string(from.storage_format) + " and " + std::to_string(to.storage_format) +
               "; only the base formats are simulated, and FRACTAL_NZ with tiles for the whole matrix";
    }
    if (product(to.dims) == 0) return std::nullopt;
    const auto status = enqueue(call.stream, call.name, [input = call.inputs[0], output = call.outputs[0]] {
        const auto on_host = [](const aclTensorDesc& desc, const aclDataBuffer& buffer) {
            const auto bytes = static_cast<std::size_t>(
                saturated_product(product(desc.storage_dims), static_cast<std::int64_t>(item_size(desc.type))));
            return static_cast<std::byte*>(host_alias(buffer.data, bytes));
        };
        copy(input.desc, on_host(input.desc, input.memory), output.desc, on_host(output.desc, output.memory));
    });
    if (status != ACL_SUCCESS) return "the launch failed with status " + std::to_string(status);
    return std::nullopt;
}

}  // namespace host_npu
