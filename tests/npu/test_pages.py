"""The documentation's code that needs an NPU, and the README's example on one."""

import pytest

from tests._pages import ON_NPU, PAGES, blocks, name_of, run

# The host NPU's own tests run its pages.
BLOCKS = [
    block
    for page in PAGES
    for block in blocks(name_of(page))
    if block.title == ON_NPU and not block.page.startswith("host-npu/")
]


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_the_code_of_a_page_runs_as_it_stands(page):
    names: dict[str, object] = {"__name__": "page"}
    for block in BLOCKS:
        if block.page == page:
            run(block, names)


def test_the_example_of_the_readme_launches_the_operators():
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks("README.md"):
        if block.language == "python":
            run(block, names)
    counts = names["report"].as_dict()
    assert counts["launches"] == {
        "aclnnApplyFusedEmaAdam": 1,
        "aclnnFusedCrossEntropyLossWithMaxSum": 1,
        "aclnnFusedLinearCrossEntropyLossGrad": 1,
        "aclnnFusedLinearOnlineMaxSum": 1,
    }
    assert all(operator["fallback"] == 0 for operator in counts["operators"].values())
