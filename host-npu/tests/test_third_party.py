"""Other people's tests on the host NPU: the table counts the results of all tests."""

import pytest

from tests import third_party

_TESTS = """
import unittest
import torch
import torch_npu


class Tests(unittest.TestCase):
    def test_right(self):
        self.assertEqual((torch.ones(2).npu() + 1).tolist(), [2, 2])

    def test_wrong(self):
        self.assertEqual((torch.ones(2).npu() + 1).tolist(), [3, 3])

    @unittest.skip("never")
    def test_skipped(self):
        pass

    def test_refused(self):
        x, cache, blocks, lengths = (torch.ones(1, *sizes).npu() for sizes in ((1, 16), (16, 1, 16), (1,), ()))
        torch_npu._npu_paged_attention_quant(x, cache, cache, 1, 1, 1.0, blocks, lengths, 1, 1, x, x, x)

    def test_refused_argument(self):
        torch_npu.npu_swiglu_quant(torch.ones(2, 32).half().npu())
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "custom_ops").mkdir()
    (folder / "custom_ops" / "test_some.py").write_text(_TESTS)
    return folder


def test_each_test_has_passed_or_failed_or_was_refused_or_skipped(checkout):
    result = third_party.run(checkout / "custom_ops" / "test_some.py", checkout, 120)
    assert (result.file, result.passed, result.failed, result.skipped) == ("custom_ops/test_some.py", 1, 1, 1)
    assert result.refused == {"ATB's PagedAttention with quantization": 1, "aclnnSwiGluQuantV2": 1}


@pytest.mark.parametrize(
    ("program", "seconds", "ended"),
    [("kill -SEGV $$", 60, "signal 11"), ("exit 3", 60, "status 3"), ("exec sleep 60", 0.5, "after 0.5 s")],
)
def test_a_process_that_ends_is_reported(program, seconds, ended, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr(third_party.sys, "executable", str(python))
    assert third_party.run(tmp_path / "test_some.py", tmp_path, seconds).ended == ended


def test_the_last_row_of_the_table_has_the_sums():
    results = [
        third_party.Result("one.py", passed=2, skipped=1, refused={"aclnnA": 3, "aclnnB": 1}),
        third_party.Result("two.py", failed=4, ended="signal 11"),
    ]
    *_, one, two, sums = third_party.table(results).splitlines()
    assert one == "| one.py | 2 | 4 | 0 | 1 | aclnnA, aclnnB |"
    assert two == "| two.py | 0 | 0 | 4 | 0 | signal 11 |"
    assert sums == "| **all** | 2 | 4 | 4 | 1 | 1 ended |"
