// The graph operators (aclop) of convolutions and deformable convolutions, and their gradients.
#include "host_npu_formulas/running_operator.h"

namespace host_npu::graph {
namespace {

struct Convolution {
    std::vector<std::int64_t> strides, padding, dilations;
    std::int64_t groups;
};

Convolution convolution(const RunningOperator& call) {
    const auto format = call.text_attribute("data_format");
    TORCH_CHECK(format == "NCHW", "the host NPU computes the data_format NCHW only, not ", format);
    const auto strides = call.list_attribute("strides"), dilations = call.list_attribute("dilations");
    const auto pads = call.list_attribute("pads");
    TORCH_CHECK(pads.at(0) == pads.at(1) && pads.at(2) == pads.at(3),
                "the host NPU pads both sides equally, but pads is ", pads);
    return {{strides.at(2), strides.at(3)},
            {pads[0], pads[2]},
            {dilations.at(2), dilations.at(3)},
            call.integer_attribute("groups")};
}

template <bool has_bias>
void conv2d(const RunningOperator& call) {
    const auto [strides, padding, dilations, groups] = convolution(call);
    const auto bias = has_bias ? call.floats(2) : Tensor();
    assign(call, at::conv2d(call.floats(0), call.floats(1), bias, strides, padding, dilations, groups));
}

Tensor gradient(const RunningOperator& call, const Tensor& dy, const Tensor& x, const Tensor& filter, bool of_filter) {
    const auto [strides, padding, dilations, groups] = convolution(call);
    const auto found = at::convolution_backward(dy, x, filter, std::nullopt, strides, padding, dilations, false, {0, 0},
                                                groups, {!of_filter, of_filter, false});
    return of_filter ? std::get<1>(found) : std::get<0>(found);
}

void conv2d_input_grad(const RunningOperator& call) {
    assign(call, gradient(call, call.floats(2), at::zeros(call.sizes_of_output()), call.floats(1), false));
}

void conv2d_filter_grad(const RunningOperator& call) {
    assign(call, gradient(call, call.floats(2), call.floats(0), at::zeros(call.sizes_of_output()), true));
}

void reduce_sum(const RunningOperator& call) { assign(call, call.floats(0).sum(call.integers(1))); }

// Where a deformable convolution reads: a point for each group of channels G, result and element of the kernel, in the
// order G, rows, rows of the kernel, columns, columns of the kernel. Offsets [N, rows, columns, 3 * G * kernel] hold
// the horizontal and the vertical distance from the place of a plain convolution, and a factor.
struct Points {
    std::vector<std::int64_t> shape;  // of points, without N
    Tensor x, y, factor;              // [N, G, points]
    Tensor pixels;                    // [N, G, H * W, C]
    std::int64_t height, width;

    Points(const RunningOperator& call, std::size_t first) {
        const auto image = call.floats(first), offsets = call.floats(first + 1);
        const auto format = call.text_attribute("data_format");
        TORCH_CHECK(format == "NHWC", "CANN takes the data_format NHWC only, not ", format);
        TORCH_CHECK(call.is_set("modulated"), "CANN takes modulated true only, not false");
        const auto kernel = call.list_attribute("ksize"), strides = call.list_attribute("strides");
        const auto pads = call.list_attribute("pads"), dilations = call.list_attribute("dilations");
        const auto groups = call.integer_attribute("deformable_groups"), count = image.size(0);
        height = image.size(1);
        width = image.size(2);
        shape = {groups, offsets.size(1), kernel.at(0), offsets.size(2), kernel.at(1)};
        const auto parts =
            offsets.view({count, shape[1], shape[3], 3, groups, shape[2], shape[4]}).permute({3, 0, 4, 1, 5, 2, 6});
        const auto places = [&](std::size_t dim, std::int64_t pad) {
            const auto starts = at::arange(shape[2 * dim - 1]) * strides.at(dim) - pad;
            return starts.unsqueeze(1) + at::arange(shape[2 * dim]) * dilations.at(dim);
        };
        x = (parts[0] + places(2, pads.at(2))).reshape({count, groups, -1});
        y = (parts[1] + places(1, pads.at(0)).unsqueeze(-1).unsqueeze(-1)).reshape({count, groups, -1});
        factor = parts[2].reshape({count, groups, -1});
        pixels = image.view({count, height * width, groups, -1}).transpose(1, 2);
    }

    // Calls `body` for each of the four pixels around the points, with its indices, whether it is in the image, its
    // weights by columns and by rows, and the derivatives of these by x and by y.
    template <class Body>
    void for_each_corner(const Body& body) const {
        const auto is_within = x.gt(-1) & x.lt(width) & y.gt(-1) & y.lt(height);
        const auto left = x.clamp(-2, width).floor(), top = y.clamp(-2, height).floor();
        for (const auto right : {0, 1}) {
            for (const auto below : {0, 1}) {
                const auto column = left + right, row = top + below;
                const auto is_pixel = is_within & column.ge(0) & column.lt(width) & row.ge(0) & row.lt(height);
                const auto index = at::where(is_pixel, row * width + column, 0).to(at::kLong).unsqueeze(-1);
                const auto indices = index.expand({-1, -1, -1, pixels.size(3)});
                body(indices, is_pixel, 1 - (x - column).abs(), 1 - (y - row).abs(), 2 * right - 1, 2 * below - 1);
            }
        }
    }
    Tensor values(const Tensor& indices, const Tensor& is_pixel) const {
        return at::where(is_pixel.unsqueeze(-1), pixels.gather(2, indices), 0);
    }
};

void deformable_offsets(const RunningOperator& call) {
    const Points points(call, 0);
    auto sum = at::zeros({});
    points.for_each_corner(
        [&](const Tensor& indices, const Tensor& is_pixel, const Tensor& by_x, const Tensor& by_y, int, int) {
            sum = sum + points.values(indices, is_pixel) * (by_x * by_y * points.factor).unsqueeze(-1);
        });
    assign(call, sum.transpose(1, 2));
}

void deformable_offsets_grad(const RunningOperator& call) {
    const Points points(call, 1);
    const auto& pixels = points.pixels;
    const auto dy = call.floats(0).view({pixels.size(0), -1, pixels.size(1), pixels.size(3)}).transpose(1, 2);
    const auto dx = at::zeros_like(pixels);
    auto of_x = at::zeros_like(points.x), of_y = at::zeros_like(points.x), of_factor = at::zeros_like(points.x);
    points.for_each_corner([&](const Tensor& indices, const Tensor& is_pixel, const Tensor& by_x, const Tensor& by_y,
                               int of_column, int of_row) {
        const auto weight = at::where(is_pixel, by_x * by_y, 0);
        dx.scatter_add_(2, indices, dy * (weight * points.factor).unsqueeze(-1));
        const auto product = (dy * points.values(indices, is_pixel)).sum(-1);
        of_x = of_x + product * by_y * points.factor * of_column;
        of_y = of_y + product * by_x * points.factor * of_row;
        of_factor = of_factor + product * weight;
    });
    call.set_output(dx.transpose(1, 2).reshape(call.sizes_of_output()), 0);
    auto shape = points.shape;
    shape.insert(shape.begin(), {3, pixels.size(0)});
    const auto offsets = at::stack({of_x, of_y, of_factor}).view(shape).permute({1, 3, 5, 0, 2, 4, 6});
    call.set_output(offsets.flatten(3), 1);
}

std::optional<std::string> run_conv2d(const GraphCall& call) {
    return call.inputs.size() == 3 ? run<3, conv2d<true>>(call) : run<2, conv2d<false>>(call);
}

const bool registered_convolutions = [] {
    simulate_graph_operator("Conv2D", run_conv2d);
    simulate_graph_operator("Conv2DBackpropInput", run<3, conv2d_input_grad>);
    simulate_graph_operator("Conv2DBackpropFilter", run<3, conv2d_filter_grad>);
    simulate_graph_operator("ReduceSum", run<2, reduce_sum>);
    simulate_graph_operator("DeformableOffsets", run<2, deformable_offsets>);
    simulate_graph_operator("DeformableOffsetsGrad", run<3, deformable_offsets_grad, false, 2>);
    return true;
}();

}  // namespace
}  // namespace host_npu::graph
