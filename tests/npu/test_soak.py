"""A short form of ``python -m benchmarks.soak``: nothing alive and no memory of the device is more after more steps."""

import pytest

from benchmarks import soak


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[pytest.mark.exhaustive, pytest.mark.simulator]),
        pytest.param("npu", marks=pytest.mark.simulator),
    ],
)
def test_training_leaks_nothing(device, monkeypatch):
    monkeypatch.setattr(soak, "_SAVE_EVERY", 60)
    samples = list(soak.soak(device, steps=360, samples=9))
    assert samples[-1].step == 360
    assert not soak.growth(samples)
    assert device == "cpu" or samples[-1].counts["bytes on the device"] > 0
