// ROIAlign, means of interpolated samples of a feature map, and its gradient.
#include <cmath>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

struct Regions {
    // [regions, 5]: the image index, then the corners x1, y1, x2, y2.
    Tensor corners;
    double scale;
    std::int64_t height, width, samples, mode;
};

// The weight of each of `size` elements in each of `pooled` bins of a region, along one dimension: [pooled, size].
Tensor shares(double begin, double end, std::int64_t pooled, std::int64_t size, const Regions& in) {
    const bool is_aligned = in.mode >= 2;
    const auto shift = is_aligned ? 0.5 : 0;
    const auto length = is_aligned ? (end - begin) * in.scale : std::max((end - begin) * in.scale, 1.0);
    const auto part = length / static_cast<double>(pooled);
    const auto samples = in.samples > 0 ? in.samples : static_cast<std::int64_t>(std::ceil(part));
    if (samples <= 0) return at::zeros({pooled, size});
    const auto at = begin * in.scale - shift + (at::arange(pooled * samples, at::kDouble) + 0.5) * (part / samples);
    const auto is_within = at.ge(-1).logical_and(at.le(size));
    const auto distance = (at.clamp(0, size - 1).unsqueeze(1) - at::arange(size, at::kDouble)).abs();
    const auto of_samples = (1 - distance).clamp_min(0) * is_within.unsqueeze(1);
    return of_samples.view({pooled, samples, size}).mean(1).to(at::kFloat);
}

// Calls `body` with the index of each region, its image, and its weights of rows and columns.
template <class Body>
void for_each_region(const Regions& in, at::IntArrayRef images, const Body& body) {
    TORCH_CHECK(in.mode == 0 || in.mode == 2 || in.mode == 3, "roiEndMode is ", in.mode,
                "; the host NPU takes 0, 2 and 3");
    TORCH_CHECK(in.samples >= 0 && in.height > 0 && in.width > 0 && images[2] > 0 && images[3] > 0, "sampleNum is ",
                in.samples, ", pooledHeight ", in.height, " and pooledWidth ", in.width, ", of images of shape ",
                images, "; CANN takes at least 0 and 1, and images that are not empty");
    if (in.corners.is_meta()) return;
    for (std::int64_t region = 0; region < in.corners.size(0); ++region) {
        const auto corner = [&](std::int64_t at) { return in.corners[region][at].item<double>(); };
        const auto image = static_cast<std::int64_t>(corner(0));
        TORCH_CHECK(image >= 0 && image < images[0], "rois has image ", image, " of ", images[0]);
        body(region, image, shares(corner(2), corner(4), in.height, images[2], in),
             shares(corner(1), corner(3), in.width, images[3], in));
    }
}

void roi_align(const Tensor& x, const Tensor& rois, float scale, std::int64_t height, std::int64_t width,
               std::int64_t samples, std::int64_t mode, const Out& out) {
    const auto pooled = at::zeros({rois.size(0), x.size(1), height, width}, x.options());
    for_each_region({rois, scale, height, width, samples, mode}, x.sizes(),
                    [&](std::int64_t region, std::int64_t image, const Tensor& rows, const Tensor& columns) {
                        pooled[region].copy_(at::matmul(at::matmul(rows, x[image]), columns.t()));
                    });
    out = pooled;
}
const Formula<"aclnnROIAlign", roi_align> regions_of_features{{"features", {ACL_FLOAT, ACL_FLOAT16}, "B C H W"},
                                                              {"rois", as("features"), "N 5"},
                                                              {"y", as("features"), "N C * *"}};

void roi_align_grad(const Tensor& dy, const Tensor& rois, const std::vector<std::int64_t>& shape, std::int64_t width,
                    std::int64_t height, float scale, std::int64_t samples, std::int64_t mode, const Out& dx) {
    require_shapes({{"ydiff", dy.sizes(), "N C " + std::to_string(height) + " " + std::to_string(width)},
                    {"rois", rois.sizes(), "N 5"},
                    {"xdiffShape", shape, "B C H W"}});
    const auto to = at::zeros(shape, dy.options());
    for_each_region({rois, scale, height, width, samples, mode}, shape,
                    [&](std::int64_t region, std::int64_t image, const Tensor& rows, const Tensor& columns) {
                        to[image].add_(at::matmul(at::matmul(rows.t(), dy[region]), columns));
                    });
    dx = to;
}
const Formula<"aclnnROIAlignBackward", roi_align_grad> regions_of_features_backward{
    {"ydiff", kFloat}, {"rois", kFloat}, {"xdiff", kFloat, "* * * *"}};

}  // namespace
}  // namespace host_npu
