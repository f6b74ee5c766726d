#include "host_npu_formulas/sequence_layouts.h"

#include <limits>

namespace host_npu {

std::pair<std::int64_t, std::int64_t> Sequences::rows(std::int64_t number) const {
    const auto length = [&](std::int64_t at) { return (*lengths)[at].item<std::int64_t>(); };
    if (layout != "TND") return {0, lengths ? length(number) : tokens.size(1)};
    const auto begin = number == 0 ? 0 : length(number - 1);
    return {begin, length(number) - begin};
}

Tensor Sequences::of(const Tensor& x, std::int64_t number) const {
    const auto [begin, count] = rows(number);
    if (!table) {
        const auto all = layout == "TND" ? x : x.select(0, number);
        TORCH_CHECK(count >= 0 && begin + count <= all.size(0), "a sequence has ", count, " tokens from ", begin,
                    " on, of ", all.size(0));
        return all.slice(0, begin, begin + count);
    }
    const auto blocks = (count + x.size(1) - 1) / x.size(1);
    TORCH_CHECK(blocks <= table->size(1), "blockTable has ", table->size(1), " blocks for ", count, " keys");
    const auto numbers = table->select(0, number).slice(0, 0, blocks).to(at::kLong);
    require_indices("blockTable", numbers, x.size(0));
    return x.index({numbers}).flatten(0, 1).slice(0, 0, count);
}

void require_sequences(const Sequences& queries, const Sequences& keys, const std::string& of_queries,
                       const std::string& size) {
    TORCH_CHECK(queries.layout == "BSND" || queries.layout == "TND", "layoutQuery is ", queries.layout,
                "; CANN takes BSND or TND");
    TORCH_CHECK(keys.layout == queries.layout || keys.layout == "PA_BSND", "layoutKey is ", keys.layout,
                "; CANN takes PA_BSND or that of the queries, ", queries.layout);
    TORCH_CHECK(queries.layout != "TND" || queries.lengths, "actualSeqLengthsQuery must be given in the layout TND");
    TORCH_CHECK(keys.layout == "BSND" || keys.lengths, "actualSeqLengthsKey must be given in the layout ", keys.layout);
    TORCH_CHECK(keys.table.has_value() == (keys.layout == "PA_BSND"),
                "blockTable must be given in the layout PA_BSND, and only there");
    const auto query = (queries.layout == "TND" ? "T " : "B S ") + of_queries, key = " 1 " + size;
    const auto batches = std::to_string(queries.count());
    std::vector<Shaped> all{{"query", queries.tokens.sizes(), query}};
    if (keys.table) {
        all.push_back({"key", keys.tokens.sizes(), "* L%16<=1024" + key});
        all.push_back({"blockTable", keys.table->sizes(), batches + " *"});
    } else {
        all.push_back({"key", keys.tokens.sizes(), (keys.layout == "TND" ? "*" : "B *") + key});
    }
    if (queries.lengths) all.push_back({"actualSeqLengthsQuery", queries.lengths->sizes(), batches});
    if (keys.lengths) all.push_back({"actualSeqLengthsKey", keys.lengths->sizes(), batches});
    require_shapes(all);
}

void require_band(std::int64_t mode, std::int64_t before, std::int64_t after) {
    // The value with which older functions select all tokens.
    constexpr std::int64_t all = std::numeric_limits<std::int32_t>::max();
    TORCH_CHECK(mode == 0 || mode == 3, "sparseMode is ", mode, "; CANN takes 0 or 3");
    TORCH_CHECK(before >= all && after >= all, "preTokens is ", before, " and nextTokens ", after, "; CANN takes ",
                std::numeric_limits<std::int64_t>::max());
}

}  // namespace host_npu
