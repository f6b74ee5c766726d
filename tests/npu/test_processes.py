"""Signals while the device computes."""

import pytest

from tests._interrupted import LOSSES, interrupt_everywhere


@pytest.mark.parametrize("name", LOSSES)
def test_ctrl_c_in_backward_raises_keyboard_interrupt_and_leaks_nothing(name):
    results, is_anything_left = interrupt_everywhere(name, "npu")
    assert set(results) == {"interrupted"} and not is_anything_left
