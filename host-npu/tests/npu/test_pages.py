"""The README's code runs unchanged, and the version that it names is the simulated one."""

import re

import torch_npu

from tests._pages import ON_NPU, README, blocks


def test_the_code_of_the_readme_runs_as_it_stands(capsys):
    names: dict[str, object] = {"__name__": "page"}
    found = blocks(README, "python")
    assert len(found) > 2 and {title for title, _ in found} == {ON_NPU}
    for _, code in found:
        exec(compile(code, str(README), "exec"), names)
    assert "injected by a test" in capsys.readouterr().out


def test_the_version_of_cann_is_the_one_that_the_readme_names():
    [version] = re.findall(r"It simulates CANN (\d+\.\d+\.\d+)\.", README.read_text())
    assert torch_npu.npu.utils.get_cann_version("CANN") == version
    assert torch_npu.npu.utils._is_gte_cann_version(version)
