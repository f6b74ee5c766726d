"""Signals while the device computes."""

import pytest

from tests._interrupted import LOSSES, interrupt_everywhere


@pytest.mark.parametrize("name", LOSSES)
def test_ctrl_c_in_backward_arrives_and_leaves_nothing_over(name):
    results, is_anything_left = interrupt_everywhere(name, "npu")
    assert set(results) == {"interrupted"} and not is_anything_left
