"""The marker ``simulator`` of tests that a device cannot run."""

import host_npu
import pytest


@pytest.mark.parametrize("name", ["count_calls", "fail", "reset", "stats"])
def test_functions_of_the_host_npu_need_the_marker(name):
    with pytest.raises(AssertionError, match=f"host_npu.{name} needs @pytest.mark.simulator"):
        getattr(host_npu, name)()


@pytest.mark.simulator
def test_with_the_marker_they_are_the_host_npu_s():
    assert host_npu.stats().alive["aclrtContext"] > 0
