// The graph operator Identity, which torch_npu uses to cast between formats.

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

// The layout of a tensor in a base or private format: for each dimension, the offsets of its indices, whose sum is the
// offset of an element. In private formats, some dimensions are split into blocks.
using Offsets = std::vector<Sizes>;

// The offsets of `size` indices in blocks of `block`, with the strides `within` a block and `between` blocks.
Sizes offsets(std::int64_t size, std::int64_t block, std::int64_t between, std::int64_t within) {
    Sizes all(static_cast<std::size_t>(size));
    for (std::int64_t index = 0; index < size; ++index) {
        all[static_cast<std::size_t>(index)] = index / block * between + index % block * within;
    }
    return all;
}

Sizes offsets(std::int64_t size, std::int64_t stride) { return offsets(size, 1, stride, 0); }

Offsets of_rows(const Sizes& dims) {
    Offsets all(dims.size());
    std::int64_t stride = 1;
    for (auto dim = dims.size(); dim-- > 0; stride *= dims[dim]) all[dim] = offsets(dims[dim], stride);
    return all;
}

// FRACTAL_NZ: columns of tiles, each from top to bottom.
std::optional<Offsets> of_tiles(const Sizes& dims, const Sizes& stored) {
    if (dims.size() < 2 || stored.size() != dims.size() + 2 || !all_at_least(1, stored)) return std::nullopt;
    const auto matrices = dims.size() - 2;
    const auto* const tiles = &stored[matrices];
    const auto column_tiles = tiles[0], row_tiles = tiles[1], tile_rows = tiles[2], tile_columns = tiles[3];
    // The tiles must have room for every element.
    if (!std::equal(dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(matrices), stored.begin()) ||
        saturated_product(row_tiles, tile_rows) < dims[matrices] ||
        saturated_product(column_tiles, tile_columns) < dims[matrices + 1]) {
        return std::nullopt;
    }
    auto all = of_rows(Sizes(stored.begin(), stored.end() - 4));
    const auto tile = tile_rows * tile_columns, matrix = column_tiles * row_tiles * tile;
    for (auto& each : all) {
        for (auto& offset : each) offset *= matrix;
    }
    all.push_back(offsets(dims[matrices], tile_rows, tile, tile_columns));
    all.push_back(offsets(dims[matrices + 1], tile_columns, row_tiles * tile, 1));
    return all;
}

std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

// NC1HWC0: images with channels split into blocks, which come last. A vector is a vector of channels.
std::optional<Offsets> of_channel_blocks(const Sizes& dims, const Sizes& stored) {
    if ((dims.size() != 1 && dims.size() != 4) || stored.size() != 5 || !all_at_least(1, stored)) return std::nullopt;
    const auto image = dims.size() == 4 ? dims : Sizes{1, dims[0], 1, 1};
    const auto block = stored[4], blocks = blocks_of(image[1], block);
    if (stored != Sizes{image[0], blocks, image[2], image[3], block}) return std::nullopt;
    const auto row = image[3] * block, plane = image[2] * row;
    auto channels = offsets(image[1], block, plane, 1);
    if (dims.size() == 1) return Offsets{channels};
    return Offsets{offsets(image[0], blocks * plane), channels, offsets(image[2], row), offsets(image[3], block)};
}

// FRACTAL_Z and FRACTAL_Z_3D: weights of a convolution, in tiles of output by input channels for each position.
std::optional<Offsets> of_weights(const Sizes& dims, const Sizes& stored) {
    if ((dims.size() != 4 && dims.size() != 5) || stored.size() != 4 || !all_at_least(1, stored)) return std::nullopt;
    const auto rows = stored[2], columns = stored[3], tile = rows * columns;
    const auto inputs = blocks_of(dims[1], columns), outputs = blocks_of(dims[0], rows);
    const bool is_3d = dims.size() == 5;
    const auto depth = is_3d ? dims[2] : 1, height = dims[dims.size() - 2], width = dims.back();
    if (stored != Sizes{depth * inputs * height * width, outputs, rows, columns}) return std::nullopt;
    const auto place = outputs * tile, row = width * place, plane = height * row;
    Offsets all{offsets(dims[0], rows, tile, columns), offsets(dims[1], columns, plane, 1)};
    if (is_3d) all.push_back(offsets(depth, inputs * plane));
    all.push_back(offsets(height, row));
    all.push_back(offsets(width, place));
    return all;
}

bool is_in_rows(const aclTensorDesc& desc) {
    return desc.storage_format == desc.format && !is_private(desc.format) && all_at_least(0, desc.storage_dims) &&
           all_at_least(0, desc.dims) && product(desc.storage_dims) == product(desc.dims);
}

// Returns nullopt if the format is not simulated, or the storage is too small or unreasonably large.
std::optional<Offsets> placement(const aclTensorDesc& desc) {
    constexpr auto most = std::int64_t{1} << 28;
    const bool is_small = std::ranges::all_of(desc.dims, [](auto size) { return 0 <= size && size <= most; });
    if (!is_small || product(desc.storage_dims) > most * most) return std::nullopt;
    switch (desc.storage_format) {
        case ACL_FORMAT_FRACTAL_NZ:
            return of_tiles(desc.dims, desc.storage_dims);
        case ACL_FORMAT_NC1HWC0:
            return of_channel_blocks(desc.dims, desc.storage_dims);
        case ACL_FORMAT_FRACTAL_Z:
        case ACL_FRACTAL_Z_3D:
            return of_weights(desc.dims, desc.storage_dims);
        default:
            return is_in_rows(desc) ? std::optional(of_rows(desc.dims)) : std::nullopt;
    }
}

// Copies the elements of the dimensions from `dim`.
void copy(const Offsets& read, const std::byte* source, const Offsets& write, std::byte* destination, std::size_t size,
          std::size_t dim) {
    if (dim == read.size()) {
        std::memcpy(destination, source, size);
        return;
    }
    for (std::size_t index = 0; index < read[dim].size(); ++index) {
        copy(read, source + static_cast<std::size_t>(read[dim][index]) * size, write,
             destination + static_cast<std::size_t>(write[dim][index]) * size, size, dim + 1);
    }
}

std::size_t stored_bytes(const aclTensorDesc& desc) {
    return static_cast<std::size_t>(
        saturated_product(product(desc.storage_dims), static_cast<std::int64_t>(item_size(desc.type))));
}

}  // namespace

bool has_places(const aclTensorDesc& desc) { return is_in_rows(desc) || placement(desc).has_value(); }

void copy_elements(const aclTensorDesc& from, const void* source, const aclTensorDesc& to, void* destination) {
    if (is_in_rows(from) && is_in_rows(to)) {
        std::memcpy(destination, source, stored_bytes(to));
        return;
    }
    // The padding of the blocks is zero.
    std::memset(destination, 0, stored_bytes(to));
    copy(placement(from).value(), static_cast<const std::byte*>(source), placement(to).value(),
         static_cast<std::byte*>(destination), item_size(to.type), 0);
}

std::optional<std::string> run_identity(const GraphCall& call) {
    if (call.inputs.size() != 1 || call.outputs.size() != 1) return "it has one input and one output";
    const auto& [from, source] = call.inputs[0];
    auto [to, destination] = call.outputs[0];
    if (from.type != to.type || item_size(to.type) == 0) return "its output has another dtype than its input";
    // When torch_npu casts a whole copy back to write a part, it describes only the part.
    if (is_private(to.storage_format)) to.dims = from.dims;
    if (from.dims != to.dims) return "its output has another shape than its input";
    if (product(to.dims) == 0 && all_at_least(0, to.dims)) return std::nullopt;
    if (!has_places(from) || !has_places(to)) {
        return "its formats are " + std::to_string(from.storage_format) + " and " + std::to_string(to.storage_format) +
               "; only the base formats, FRACTAL_NZ, NC1HWC0, FRACTAL_Z and FRACTAL_Z_3D are simulated, with a place "
               "for every element";
    }
    const auto status =
        enqueue(call.stream, call.name, [input = call.inputs[0], output = GraphTensor{to, destination}] {
            copy_elements(input.desc, host_alias(input.memory.data, stored_bytes(input.desc)), output.desc,
                          host_alias(output.memory.data, stored_bytes(output.desc)));
        });
    if (status != ACL_SUCCESS) return "the launch failed with status " + std::to_string(status);
    return std::nullopt;
}

}  // namespace host_npu
