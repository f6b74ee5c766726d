// op::fp16_t, compared with the tests' own conversion.
#include "aclnn/opdev/fp16_t.h"
#include "tests/device.h"

namespace {

using namespace test;

CASE("fp16/conversions") {
    for (const double value : {0.0, -0.0, 1.0, -2.5, 0.1, 65504.0, 65519.9, 65520.0, 1e-7, 3e-8, 1.00048828125,
                               1.000488281250001, 2049.0, 2051.0}) {
        const double expected = rounded(ACL_FLOAT16, value);
        expect_equal(static_cast<double>(op::fp16_t(value)), expected, value, " as a double");
        const auto single = static_cast<float>(value);
        expect_equal(static_cast<float>(op::fp16_t(single)), rounded(ACL_FLOAT16, single), single, " as a float");
    }
    expect(std::isnan(static_cast<float>(op::fp16_t(NAN))), "NaN is a number");
    expect_equal(op::fp16_t(std::uint16_t{0x3C00}).toFloat(), 1.0f, "the bits 0x3C00");
}

CASE("fp16/integers") {
    op::fp16_t half = 2.5f;
    expect_equal(half.toInt32(), 2, "2.5, to even");
    expect_equal((half = -1000).toInt8(), -128, "-1000 in 8 bits");
    expect_equal((half = -1000).toUInt16(), 0, "-1000 without a sign");
    expect_equal((half = 1e9).toInt16(), 32767, "an infinity in 16 bits");
    expect_equal(half.IsInf(), 1, "IsInf");
    expect_equal((half = std::int64_t{-1} << 40).IsInf(), -1, "IsInf of -2^40");
    expect_equal(static_cast<float>(half = std::int32_t{2049}), 2048.0f, "2049");
}

CASE("fp16/arithmetic") {
    op::fp16_t x = 3.0f;
    const op::fp16_t y = 0.1f;
    const double tenth = rounded(ACL_FLOAT16, 0.1);
    expect_equal((x + y).toDouble(), rounded(ACL_FLOAT16, 3 + tenth), "the sum");
    expect_equal((x - y).toDouble(), rounded(ACL_FLOAT16, 3 - tenth), "the difference");
    expect_equal((x * y).toDouble(), rounded(ACL_FLOAT16, 3 * tenth), "the product");
    expect_equal((x / y).toDouble(), rounded(ACL_FLOAT16, 3 / tenth), "the quotient");
    x += y;
    expect(x > y && x >= y && y < x && y <= x && x != y && x == x, "the order");
    expect(op::fp16_t(0.0f) == op::fp16_t(-0.0f), "the zeros differ");
}

}  // namespace
