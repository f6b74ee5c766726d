// The graph operators (aclop) of boxes: overlaps, their gradients, and the offsets of boxes from others.
#include "host_npu_formulas/running_operator.h"

namespace host_npu::graph {
namespace {

// Corners, [2, ...]: x and y.
struct Corners {
    Tensor low, high;

    Tensor sizes() const { return high - low; }
    Tensor centers() const { return (low + high) / 2; }
};

// Boxes [4, N], which are x, y, w, h of their centers with `trans`, and otherwise two corners.
Corners corners(const RunningOperator& call, std::size_t index) {
    const auto boxes = call.floats(index);
    const auto first = boxes.slice(0, 0, 2), second = boxes.slice(0, 2, 4);
    if (!call.is_set("trans")) return {first, second};
    return {first - second / 2, first + second / 2};
}

// CANN adds these to sizes, so that empty boxes divide by no 0: forward, and in gradients.
constexpr double kForward = 1e-16, kBackward = 1e-9;

struct Overlap {
    Tensor size, inter, all, ratio, hull, distance;

    Overlap(const Corners& box, const Corners& truth, double epsilon, bool of_truth = false)
        : size(at::minimum(box.high, truth.high) - at::maximum(box.low, truth.low)),
          inter(size.clamp_min(0).prod(0)),
          all((truth.sizes() + epsilon).prod(0)),
          hull(at::maximum(box.high, truth.high) - at::minimum(box.low, truth.low)),
          distance(box.centers() - truth.centers()) {
        if (!of_truth) all = all + (box.sizes() + epsilon).prod(0) - inter;
        ratio = inter / all;
    }
    Tensor squared_distance() const { return distance.square().sum(0); }
    Tensor squared_diagonal(double epsilon) const { return hull.square().sum(0) + epsilon; }
};

Overlap overlap(const RunningOperator& call) {
    return {corners(call, 0), corners(call, 1), kForward, call.text_attribute("mode") == "iof"};
}

Tensor distance_overlap(const Overlap& of) { return of.ratio - of.squared_distance() / of.squared_diagonal(kForward); }

void giou(const RunningOperator& call) {
    const auto of = overlap(call);
    const auto hull = (of.hull + kForward).prod(0);
    assign(call, of.ratio - (hull - of.all) / hull);
}

void diou(const RunningOperator& call) { assign(call, distance_overlap(overlap(call))); }

Tensor angle(const Corners& box) {
    const auto size = box.sizes();
    return at::atan((size[0] / (size[1] + kBackward)).clamp_max(10000));
}

Tensor difference_of_shapes(const Tensor& angles) { return angles.square() * (4 / (M_PI * M_PI)); }

// NaN for equal boxes, as in CANN's kernel.
void ciou(const RunningOperator& call) {
    const auto of = overlap(call);
    const auto angles = angle(corners(call, 1)) - angle(corners(call, 0));
    const auto v = difference_of_shapes(angles);
    assign(call, distance_overlap(of) - v * v / (1 + kForward + v - of.ratio));
    call.set_output(angles.unsqueeze(0), 1);
}

// The gradients of the parts of an overlap: of areas [N], and of sizes [2, N]. Where corners are equal, CANN gives the
// gradient of the chosen one to the truth.
struct Gradient {
    Tensor inter, all, hull, distance, of_box_size, of_truth_size;
};

void set_gradients(const RunningOperator& call, const Overlap& of, const Corners& box, const Corners& truth,
                   const Gradient& dy) {
    const auto length = at::where(of.size.ge(0), (dy.inter - dy.all) * of.size.clamp_min(0).flip(0), 0);
    const auto set = [&](std::size_t index, const Corners& one, const Tensor& inner_low, const Tensor& inner_high,
                         const Tensor& outer_low, const Tensor& outer_high, const Tensor& of_size,
                         const Tensor& of_center) {
        const auto size = dy.all * (one.sizes().clamp_min(0) + kBackward).flip(0) + of_size;
        const auto low = -(length * inner_low) - dy.hull * outer_low - size + of_center / 2;
        const auto high = length * inner_high + dy.hull * outer_high + size + of_center / 2;
        call.set_output(call.is_set("trans") ? at::cat({low + high, (high - low) / 2}) : at::cat({low, high}), index);
    };
    const auto low = box.low.gt(truth.low), high = box.high.lt(truth.high);
    const auto lowest = box.low.lt(truth.low), highest = box.high.gt(truth.high);
    set(0, box, low, high, lowest, highest, dy.of_box_size, dy.distance);
    set(1, truth, ~low, ~high, ~lowest, ~highest, dy.of_truth_size, -dy.distance);
}

Gradient overlap_gradient(const Tensor& dy, const Overlap& of) {
    const auto none = at::zeros_like(of.size);
    return {dy / of.all, -dy * of.inter / of.all.square(), none, none, none, none};
}

void giou_grad(const RunningOperator& call) {
    const auto box = corners(call, 1), truth = corners(call, 2);
    const Overlap of(box, truth, kBackward);
    const auto dy = call.floats(0).flatten(), sizes = of.hull + kBackward, hull = sizes.prod(0);
    auto gradient = overlap_gradient(dy, of);
    gradient.all = gradient.all + dy / hull;
    gradient.hull = -dy * of.all / hull.square() * sizes.flip(0);
    set_gradients(call, of, box, truth, gradient);
}

Gradient distance_gradient(const Tensor& dy, const Overlap& of) {
    auto gradient = overlap_gradient(dy, of);
    const auto squared = of.squared_diagonal(kBackward);
    gradient.hull = 2 * of.hull * dy * of.squared_distance() / squared.square();
    gradient.distance = -2 * of.distance * dy / squared;
    return gradient;
}

void diou_grad(const RunningOperator& call) {
    const auto box = corners(call, 1), truth = corners(call, 2);
    const Overlap of(box, truth, kBackward);
    set_gradients(call, of, box, truth, distance_gradient(call.floats(0).flatten(), of));
}

// The gradient of the angle of a box by its size.
Tensor angle_gradient(const Corners& box) {
    const auto size = box.sizes().clamp_min(0) + kBackward;
    return at::stack({size[1], -size[0]}) / size.square().sum(0);
}

// The factor of the difference of shapes is a constant.
void ciou_grad(const RunningOperator& call) {
    const auto box = corners(call, 1), truth = corners(call, 2);
    const Overlap of(box, truth, kBackward);
    const auto dy = call.floats(0).flatten(), angles = call.floats(3).flatten(), v = difference_of_shapes(angles);
    auto gradient = distance_gradient(dy, of);
    const auto of_angles = -dy * v / (1 + kBackward + v - of.ratio) * angles * (8 / (M_PI * M_PI));
    gradient.of_box_size = -of_angles * angle_gradient(box);
    gradient.of_truth_size = of_angles * angle_gradient(truth);
    set_gradients(call, of, box, truth, gradient);
}

// Two corners, of boxes [N, 4].
Corners rows(const Tensor& boxes) {
    const auto columns = boxes.t();
    return {columns.slice(0, 0, 2), columns.slice(0, 2, 4)};
}

// Of every pair. An epsilon of at least 1 is 1 and is also added to the overlap.
void iou(const RunningOperator& call) {
    const auto epsilon = std::min(call.float_attribute("eps"), 1.0F), of_overlap = epsilon < 1 ? 0 : epsilon;
    const auto box = rows(call.floats(0)), truth = rows(call.floats(1));
    const auto low = at::maximum(box.low.unsqueeze(1), truth.low.unsqueeze(2));
    const auto high = at::minimum(box.high.unsqueeze(1), truth.high.unsqueeze(2));
    const auto inter = (high - low + of_overlap).clamp_min(0).prod(0);
    auto all = (truth.sizes() + epsilon).prod(0).unsqueeze(1);
    if (call.text_attribute("mode") == "iou") all = all + (box.sizes() + epsilon).prod(0) - inter;
    assign(call, inter / all);
}

Tensor numbers(const std::vector<float>& values) { return at::tensor(values).unsqueeze(1); }

// Corners are pixels here: a box of equal corners has the size 1. CANN's kernels compute float32 in float16, too.
void bounding_box_encode(const RunningOperator& call) {
    const auto halves = [&](std::size_t index) { return rows(call.floats(index).to(at::kHalf).to(at::kFloat)); };
    const auto box = halves(0), truth = halves(1);
    const auto size = box.sizes() + 1;
    const auto offsets = at::cat({(truth.centers() - box.centers()) / size, ((truth.sizes() + 1) / size).log()});
    const auto result = (offsets - numbers(call.floats_attribute("means"))) / numbers(call.floats_attribute("stds"));
    assign(call, result.t().to(at::kHalf));
}

void bounding_box_decode(const RunningOperator& call) {
    const auto box = rows(call.floats(0));
    const auto offsets =
        call.floats(1).t() * numbers(call.floats_attribute("stds")) + numbers(call.floats_attribute("means"));
    const auto size = box.sizes() + 1;
    const auto limit = std::abs(std::log(call.float_attribute("wh_ratio_clip")));
    const auto center = box.centers() + offsets.slice(0, 0, 2) * size;
    const auto half = (offsets.slice(0, 2, 4).clamp(-limit, limit).exp() * size - 1) / 2;
    const auto image = at::tensor(call.list_attribute("max_shape")).flip(0).unsqueeze(1) - 1;
    const auto corner = [&](const Tensor& at) { return at::minimum(at, image).clamp_min(0); };
    assign(call, at::cat({corner(center - half), corner(center + half)}).t());
}

// The centers of boxes within the cell of a grid, and the logarithms of their sizes relative to others.
void yolo_boxes_encode(const RunningOperator& call) {
    const auto box = rows(call.floats(0)), truth = rows(call.floats(1));
    const auto center = (truth.centers() - box.centers()) / call.floats(2) + 0.5;
    const auto size = (truth.sizes() / box.sizes()).clamp(1e-6, 65504);
    assign(call, at::cat({center.clamp(1e-6, 1 - 1e-6), size.log()}).t());
}

// Whether the center of a box is in a cell of the grid, or beyond a cell of its border.
void anchor_response_flags(const RunningOperator& call) {
    const auto center = rows(call.floats(0)).centers();
    const auto size = call.list_attribute("featmap_size"), strides = call.list_attribute("strides");
    const auto cell = [&](std::int64_t dim, std::int64_t stride, std::int64_t count) {
        return (center[dim] / stride).floor().clamp(0, count - 1).to(at::kLong);
    };
    const auto cells = cell(1, strides.at(1), size.at(0)) * size.at(1) + cell(0, strides.at(0), size.at(1));
    const auto flags = at::zeros({size[0] * size[1]}, at::kByte).index_fill(0, cells, 1);
    assign(call, flags.repeat_interleave(call.integer_attribute("num_base_anchors")));
}

template <std::size_t inputs, void (*compute)(const RunningOperator&), std::size_t outputs = 1>
std::optional<std::string> run_boxes(const GraphCall& call) {
    for (std::size_t index = 0; index < std::min<std::size_t>(call.inputs.size(), 2); ++index) {
        const auto type = call.inputs[index].desc.type;
        if (type != ACL_FLOAT && type != ACL_FLOAT16)
            return "input " + std::to_string(index) + " must be float32 or float16, but it has aclDataType " +
                   std::to_string(type);
    }
    return run<inputs, compute, false, outputs>(call);
}

// CANN computes box by box, and the gradients of the intersection over the union only.
template <std::size_t inputs, void (*compute)(const RunningOperator&), std::size_t outputs, std::size_t first = 0>
std::optional<std::string> run_pairs(const GraphCall& call) {
    const auto is = [&](const char* name, const aclopAttr::Value& value) {
        const auto found = call.attributes.values.find(name);
        return found != call.attributes.values.end() && found->second == value;
    };
    if (!is("is_cross", std::int64_t{0})) return "its attribute is_cross must be false, but it is true";
    if (first == 1 && !is("mode", std::string("iou"))) return "its attribute mode must be iou, but it is iof";
    if (call.inputs.size() == inputs) {
        try {
            require_shapes({{"bboxes", call.inputs[first].desc.dims, "4 N"},
                            {"gtboxes", call.inputs[first + 1].desc.dims, "4 N"}});
        } catch (const Refusal& refusal) {
            return refusal.text;
        }
    }
    return run_boxes<inputs, compute, outputs>(call);
}

const bool registered_boxes = [] {
    simulate_graph_operator("GIoU", run_pairs<2, giou, 1>);
    simulate_graph_operator("GIoUGrad", run_pairs<3, giou_grad, 2, 1>);
    simulate_graph_operator("DIoU", run_pairs<2, diou, 1>);
    simulate_graph_operator("DIoUGrad", run_pairs<3, diou_grad, 2, 1>);
    simulate_graph_operator("CIoU", run_pairs<2, ciou, 2>);
    simulate_graph_operator("CIoUGrad", run_pairs<4, ciou_grad, 2, 1>);
    simulate_graph_operator("Iou", run_boxes<2, iou>);
    simulate_graph_operator("BoundingBoxEncode", run_boxes<2, bounding_box_encode>);
    simulate_graph_operator("YoloBoxesEncode", run_boxes<3, yolo_boxes_encode>);
    simulate_graph_operator("AnchorResponseFlags", run_boxes<1, anchor_response_flags>);
    simulate_graph_operator("BoundingBoxDecode", run_boxes<2, bounding_box_decode>);
    return true;
}();

}  // namespace
}  // namespace host_npu::graph
