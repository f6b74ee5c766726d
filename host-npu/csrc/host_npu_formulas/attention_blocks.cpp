#include "host_npu_formulas/attention_blocks.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>

namespace host_npu {
namespace {

// The smallest sum of weights; makes the result 0 for a query that attends to nothing.
constexpr double kLeast = std::numeric_limits<float>::min();

// The fraction of the weights that may belong to other keys.
constexpr double kAlmostNone = 1e-5;

// The number of scores of a block, which fit into a core's cache twice, as the gradient needs.
constexpr std::int64_t kScores = 1 << 16;
constexpr std::int64_t kRows = 64;

// A block of batches, heads and queries, and its number of keys, from the first.
struct Block {
    std::int64_t batch, batches, head, heads, row, rows, keys;

    Tensor of_queries(const Tensor& x) const { return of_heads(x).narrow(2, row, rows); }
    Tensor of_keys(const Tensor& x) const { return of_heads(x).narrow(2, 0, keys); }

    // The block of a tensor that broadcasts to the scores.
    Tensor of(const Tensor& x) const {
        const auto some = [&](const Tensor& all, std::int64_t dim, std::int64_t first, std::int64_t count) {
            return all.size(dim) == 1 ? all : all.narrow(dim, first, count);
        };
        return some(some(some(some(x, 0, batch, batches), 1, head, heads), 2, row, rows), 3, 0, keys);
    }

  private:
    Tensor of_heads(const Tensor& x) const { return x.narrow(0, batch, batches).narrow(1, head, heads); }
};

// Returns how many of `available` parts, of `size` scores each, fit into a block; at least one.
std::int64_t fitting(std::int64_t size, std::int64_t available) {
    return std::clamp<std::int64_t>(kScores / std::max<std::int64_t>(size, 1), 1, std::max<std::int64_t>(available, 1));
}

// Distributes batches and heads over threads, unless `in_turn`. Within a block, each thread works alone: PyTorch's
// functions would distribute every small tensor over the threads and wait for them.
template <class Body>
void for_each_block(const Tensor& query, const Tensor& key, std::int64_t last, bool in_turn, const Body& body) {
    const auto batches = query.size(0), heads = query.size(1), rows = query.size(2), keys = key.size(2);
    // Meta tensors need no blocks.
    if (query.is_meta()) {
        body(Block{0, batches, 0, heads, 0, rows, keys});
        return;
    }
    const auto some_rows =
        std::min(std::max<std::int64_t>(rows, 1), std::max(kRows, kScores / std::max<std::int64_t>(keys * heads, 1)));
    const auto some_heads = fitting(keys * some_rows, heads);
    const auto some_batches = some_heads == heads ? fitting(keys * some_rows * heads, batches) : 1;
    const auto across_heads = at::divup(heads, some_heads);
    const auto compute = [&](std::int64_t begin, std::int64_t end) {
        const c10::InferenceMode without_autograd;  // of this thread
        for (std::int64_t index = begin; index < end; ++index) {
            const auto batch = index / across_heads * some_batches, head = index % across_heads * some_heads;
            for (std::int64_t row = 0; row < rows; row += some_rows) {
                const auto count = std::min(some_rows, rows - row);
                const auto attended =
                    last < keys && keys > 0 ? std::clamp<std::int64_t>(row + count + last, 1, keys) : keys;
                body(Block{batch, std::min(some_batches, batches - batch), head, std::min(some_heads, heads - head),
                           row, count, attended});
            }
        }
    };
    const auto parts = at::divup(batches, some_batches) * across_heads;
    if (in_turn) {
        compute(0, parts);
    } else {
        at::parallel_for(0, parts, 1, compute);
    }
}

// Sets masked scores to minus infinity, even NaN. Bitwise operations take a fraction of masked_fill_'s time.
class LeftOut {
  public:
    explicit LeftOut(const OptionalTensor& left_out) {
        if (!left_out) return;
        const auto ones = left_out->to(at::kInt);
        kept_ = ones - 1;
        infinities_ = ones * std::bit_cast<std::int32_t>(-std::numeric_limits<float>::infinity());
    }

    void fill(const Block& block, const Tensor& scores) const {
        if (!kept_.defined()) return;
        scores.view(at::kInt).bitwise_and_(block.of(kept_)).bitwise_or_(block.of(infinities_));
    }

  private:
    Tensor kept_, infinities_;
};

Tensor scores_of(const Block& block, const Tensor& query, const Tensor& key, const Scores& scores,
                 const LeftOut& left_out) {
    auto products = block.of_queries(query).matmul(block.of_keys(key).transpose(-1, -2));
    if (scores.summand) products.add_(block.of(*scores.summand));
    left_out.fill(block, products);
    return products;
}

// The maximum of each row, also for a sequence without keys.
Tensor largest_of(const Tensor& scores) {
    if (scores.size(3) > 0) return scores.amax({-1}, true).clamp_min_(kLowest);
    return at::full({scores.size(0), scores.size(1), scores.size(2), 1}, kLowest, scores.options());
}

// Replaces scores by weights before normalization. PyTorch's exp2 is faster than exp, and as fast for minus infinity.
Tensor weights_of(const Tensor& scores, const Tensor& max) {
    return scores.sub_(max).mul_(std::numbers::log2e).exp2_();
}

// Views the sinks of the block's heads so that they broadcast to the scores.
Tensor sinks_of(const Tensor& sink, const Block& block) {
    return sink.narrow(0, block.head, block.heads).view({1, -1, 1, 1});
}

Tensor like_rows(const Tensor& x, std::int64_t size) {
    return at::empty({x.size(0), x.size(1), x.size(2), size}, x.options());
}

// Adds the gradient of a block, summed over the dimensions in which `grad` broadcasts.
void add_to(const Tensor& grad, const Block& block, const Tensor& of_block) {
    const auto own = block.of(grad);
    own.add_(of_block.sum_to_size(own.sizes()));
}

}  // namespace

Forward attend_in_blocks(const Tensor& query, const Tensor& key, const Tensor& value, const Scores& scores) {
    const auto q = (query * scores.scale).contiguous(), k = key.contiguous(), v = value.contiguous();
    const Forward all{like_rows(q, v.size(-1)), like_rows(q, 1), like_rows(q, 1)};
    const LeftOut left_out(scores.left_out);
    for_each_block(q, k, scores.last, false, [&](const Block& block) {
        auto weights = scores_of(block, q, k, scores, left_out);
        auto max = largest_of(weights);
        if (scores.sink) max = at::maximum(max, sinks_of(*scores.sink, block));
        auto sum = weights_of(weights, max).sum({-1}, true);
        if (scores.sink) sum += at::exp(sinks_of(*scores.sink, block) - max);
        if (scores.dropout) weights.mul_(block.of(*scores.dropout));
        block.of_queries(all.result).copy_(weights.matmul(block.of_keys(v)).div_(sum.clamp_min(kLeast)));
        block.of_queries(all.max).copy_(max);
        block.of_queries(all.sum).copy_(sum);
    });
    return all;
}

Gradients gradients_in_blocks(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                              const OptionalTensor& result, const Tensor& max, const Tensor& sum,
                              const Scores& scores) {
    const auto q = (query * scores.scale).contiguous(), k = key.contiguous(), v = value.contiguous();
    const auto divisor = sum.masked_fill(sum.eq(0), 1);
    // With this factor, the weights need not be normalized.
    const auto d = (dy / divisor).contiguous();
    const auto means = result ? (d * *result).sum({-1}, true) : Tensor();
    Gradients all{like_rows(q, q.size(-1)), at::zeros_like(k), at::zeros_like(v), Tensor(), Tensor()};
    if (scores.summand) all.summand = at::zeros_like(*scores.summand);
    if (scores.sink) all.sink = at::zeros_like(*scores.sink);
    const LeftOut left_out(scores.left_out);
    // Blocks of different batches and heads add to the same gradient of the summand or sink.
    for_each_block(q, k, scores.last, scores.summand || scores.sink, [&](const Block& block) {
        const auto weights = weights_of(scores_of(block, q, k, scores, left_out), block.of_queries(max));
        auto ds = block.of_queries(d).matmul(block.of_keys(v).transpose(-1, -2));
        if (scores.dropout) ds.mul_(block.of(*scores.dropout));
        auto mean = (ds * weights).sum({-1}, true).div_(block.of_queries(divisor));
        if (result) {
            // If these keys are all keys, use the exact mean: a 16-bit result is rounded.
            const auto have_all = (weights.sum({-1}, true) / block.of_queries(divisor) - 1).abs_().lt(kAlmostNone);
            mean = at::where(have_all, mean, block.of_queries(means));
        }
        ds.sub_(mean).mul_(weights);
        block.of_queries(all.query).copy_(ds.matmul(block.of_keys(k)).mul_(scores.scale));
        block.of_keys(all.key).add_(ds.transpose(-1, -2).matmul(block.of_queries(q)));
        if (scores.dropout) weights.mul_(block.of(*scores.dropout));
        block.of_keys(all.value).add_(weights.transpose(-1, -2).matmul(block.of_queries(d)));
        if (scores.summand) add_to(all.summand, block, ds);
        if (scores.sink) {
            // The sink has no value, so only the mean contributes to its derivative.
            const auto of_rows = at::exp(sinks_of(*scores.sink, block) - block.of_queries(max)) * mean;
            all.sink.narrow(0, block.head, block.heads).sub_(of_rows.sum(at::IntArrayRef({0, 2, 3})));
        }
    });
    return all;
}

}  // namespace host_npu
