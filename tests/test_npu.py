"""Runs tests/npu on the host NPU in processes with other settings, and tests that end or configure a process."""

import importlib.util
import logging
import os
import re
import runpy
import shutil
import subprocess
from functools import partial
from pathlib import Path

from torch_aclnn_ops import _extension, _torch_npu, doctor
from torch_aclnn_ops import functional as F
from torch_aclnn_ops.optim import FusedEmaAdam

import host_npu
import pytest
import torch
from host_npu import _libraries
from host_npu.testing import outcomes, run

from tests._children import run_pytest
from tests._optim import Weights, averages_of, weights_of

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("torch_aclnn_ops._C") is None:
    pytest.skip("the NPU extension is not built", allow_module_level=True)
LIBRARIES = Path(host_npu.__file__).parent / "_lib"
MODES = {
    "queue": {},
    "no queue": {"TASK_QUEUE_ENABLE": "0"},
    "queue that does more": {"TASK_QUEUE_ENABLE": "2"},
    "blocking": {"ASCEND_LAUNCH_BLOCKING": "1"},
}


def _run(function, *arguments, **settings):
    """Call a function in a process with two NPUs and these settings, and return its outcome."""
    options = {"devices": 2, "backend": "", "environment": settings, "timeout": 1200}
    [outcome] = outcomes(function, 1, *arguments, device="npu", **options)
    assert outcome.error is None, outcome.error + outcome.output[-5000:]
    return outcome


def _run_tests(mode: str, *arguments: str, **settings: str) -> None:
    result = _run(run_pytest, *arguments, **MODES[mode], **settings)
    assert result.value == 0 and " passed" in result.output, result.output[-7000:]


def test_everything_on_the_host_npu():
    _run_tests("queue", "tests/npu")


def test_launches_and_failures_without_a_queue():  # the exhaustive cases test everything in every mode
    files = (f"tests/npu/test_{name}.py" for name in ("raw_operators", "failures", "invalid_arguments"))
    # The entry points differ only before the launch.
    _run_tests("no queue", *files, "-k", "not _C and not package")


@pytest.mark.exhaustive
def test_a_hundred_thousand_calls_on_the_host_npu():
    _run_tests("queue", "tests/npu", "-m", "exhaustive")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "queue"])
def test_everything_without_the_usual_queue(mode):
    # The leak test is about the extension, not about the queue, and takes as long as all others.
    _run_tests(mode, "tests/npu", "--ignore=tests/npu/test_leaks.py")


@pytest.mark.parametrize("chip", ["Ascend310P", "Ascend910", "Ascend950"])
def test_other_chips(chip):
    _run_tests("queue", "tests/npu/test_other_chips.py", HOST_NPU_SOC=chip)


def _said(call):
    try:
        call()
        return "nothing"
    except RuntimeError as error:
        return str(error)


def _backward(one):
    torch.ops.torch_aclnn_ops.mse_loss_backward(one, one, one, 0)
    torch.npu.synchronize()


def _stop_the_queue(one):
    """Make an operator fail in the queue; return torch_npu's one-time message."""
    torch.npu.synchronize()
    host_npu.fail("aclnnMseLossBackward", status=361001, message="EZ9903: asked for by a test")
    # torch_npu empties its queue before it records the failure: a synchronization in between gets the host NPU's error.
    errors = (_said(partial(_backward, one)) for _ in range(100))
    return next(error for error in errors if "torch_npu's task queue has ended" not in error)


def _calls_after_a_failure(device):
    one = torch.rand(3).npu()
    said = [_stop_the_queue(one), *(_said(partial(_backward, one)) for _ in range(3))]
    alive = host_npu.stats().alive
    return said, alive.get("aclTensor"), alive.get("aclOpExecutor")


@pytest.mark.parametrize("queue", ["1", "2"])
def test_a_failure_in_the_queue_is_raised_once_and_each_later_call_reports_the_stopped_queue(queue):
    result = _run(_calls_after_a_failure, TASK_QUEUE_ENABLE=queue)
    (first, *later), *alive = result.value
    assert first.startswith("The Inner error is reported as above")
    assert first.splitlines()[0].endswith("aclnnMseLossBackward.")
    assert "asked for by a test" in result.output
    sentence = "aclnnMseLossBackward: torch_npu's task queue has ended, because an earlier operator failed, "
    assert len(later) == 3 and all(one.startswith(sentence) for one in later), result
    assert not any(alive)


def _fallbacks_after_a_failure(device):
    one = torch.rand(3).npu()
    small, rows, head = (torch.rand(n, 64).npu().requires_grad_() for n in (8, 256, 512))
    target, loss = torch.zeros(256).long().npu(), F.linear_cross_entropy
    before = loss(small, head, target[:8]), loss(rows, head, target, softcap=3.0)
    none = loss(rows, head, target, softcap=3.0, reduction="none").sum()
    doubles = torch.rand(3).double().npu().requires_grad_()
    before_doubles = F.mse_loss(doubles, torch.zeros(3).double().npu())
    _stop_the_queue(one)
    calls = [
        lambda: loss(small, head, target[:8]),
        before[0].backward,
        lambda: loss(rows, head, target),
        lambda: loss(rows, head, target, softcap=3.0),
        lambda: loss(rows, head, target, chunk_size=32),
        lambda: loss(rows.detach(), head.detach(), target, label_smoothing=0.1, reduction="none"),
        lambda: loss(rows.bfloat16(), head.bfloat16(), target, linear_bias=torch.zeros(512).bfloat16().npu()),
        lambda: loss(rows.bfloat16(), head.bfloat16(), target),
        none.backward,
        before_doubles.backward,
        lambda: F.mse_loss(doubles[:2], doubles[1:]),
    ]
    return [_said(call) for call in calls]


def test_the_pytorch_fallback_also_reports_the_stopped_queue():
    # Either the package's message or the host NPU's, which raises for calls that a device silently ignores.
    for said in _run(_fallbacks_after_a_failure, TASK_QUEUE_ENABLE="1").value:
        assert re.search("torch_npu's (task )?queue has ended", said)


def _without_an_operator(device, folder):
    """Return what is raised, logged and reported if CANN's libraries, those in a folder, lack an operator."""
    _libraries.FOLDER = folder
    host_npu.enable()
    import torch_npu  # noqa: F401

    one, other = torch.rand(3).npu().requires_grad_(), torch.rand(3).npu()
    raised = _said(lambda: torch.ops.torch_aclnn_ops.mse_loss_backward(other, other, other, 0))
    logging.basicConfig(level=logging.DEBUG)
    F.mse_loss(one, other).backward()
    torch.testing.assert_close(one.grad.cpu(), (2 / 3 * (one - other)).detach().cpu())
    torch.ops.torch_aclnn_ops.binary_cross_entropy_backward(other, other, other, None, 0)
    return raised, doctor.describe()


def test_a_missing_cann_operator_is_reported_with_what_works_without_it(tmp_path):
    # A host NPU whose libraries lack an operator's name.
    shutil.copytree(LIBRARIES, tmp_path / "cann")
    library = tmp_path / "cann" / "libopapi.so"
    content = library.read_bytes()
    for name in (b"aclnnMseLossBackward\0", b"aclnnMseLossBackwardGetWorkspaceSize\0"):
        content = content.replace(name, name.replace(b"Mse", b"Xyz"))
    library.write_bytes(content)
    [outcome] = outcomes(_without_an_operator, 1, tmp_path / "cann", backend="")
    assert outcome.error is None, outcome.error + outcome.output
    raised, described = outcome.value
    sentence = (
        "CANN's libraries (libcust_opapi.so, libopapi_*.so, libopapi.so) have no aclnnMseLossBackwardGetWorkspaceSize"
        " and aclnnMseLossBackward: this CANN is too old for the operator, or its package of operators is not installed"
    )
    assert f"{sentence}. The other operators work, and torch_aclnn_ops.functional, nn and" in raised
    assert f"mse_loss_backward: PyTorch fallback, because {sentence}" in outcome.output
    assert f"PyTorch fallback: {sentence}" in " ".join(described.split())


def _step_where_torch_npu_came_last(device):
    host_npu.enable()
    import torch_npu  # noqa: F401

    weight = torch.nn.Parameter(torch.ones(3, device="npu"))
    optimizer = FusedEmaAdam([weight], lr=0.5, weight_decay=0.0, flatten=True)
    weight.grad = torch.ones(3, device="npu")
    optimizer.step()
    return weight.tolist()


def test_a_flattened_step_works_if_torch_npu_is_imported_after_the_optimizer():
    assert run(_step_where_torch_npu_came_last, 1, backend="") == [[0.5, 0.5, 0.5]]


def _steps_in_float64(device, options):
    """Return weights and averages if parameters have no gradient in every second step."""
    model = Weights().to(device)
    optimizer = FusedEmaAdam(model.parameters(), lr=torch.tensor(0.1), **options)
    for step in range(4):
        reference = Weights()
        reference.set_gradients(step)
        for i, (weight, other) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
            weight.grad = other.grad.to(device) if (i + step) % 2 else None
        if step == 3:
            model.weights[1].data.fill_(torch.inf)  # it has no gradient
        optimizer.step()
    return [tensor.detach().cpu() for tensor in (*weights_of(model), *averages_of(model, optimizer))]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-14),
        ({"ema_decay": 0.3, "flatten": True}, 1e-14),
        ({"ema_decay": 1.0}, 1e-14),
        ({"ema_warmup": "ratio"}, 1e-7),  # decays of steps on a device are float32
    ],
    ids=str,
)
def test_steps_in_float64_need_nothing_that_cann_lacks_in_float64(options, tolerance):
    outcome = _run(_steps_in_float64, options, HOST_NPU_DTYPES="cann")
    expected = _steps_in_float64("cpu", options)
    torch.testing.assert_close(outcome.value, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_check_values_takes_a_bool():
    with pytest.raises(TypeError, match="^check_values: enabled must be a bool, but it is 'yes'"):
        _extension.check_values("yes")


def test_without_cann_the_reason_is_reported():
    if _torch_npu.why_unavailable() is None:
        pytest.skip("there is a CANN")
    assert _extension.why_unavailable() == _torch_npu.why_unavailable()
    assert _extension.soc() is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_signatures_are_compared_with_canns_headers_if_installed(tmp_path):
    # The host NPU's headers declare the same functions, written independently from the documents.
    headers = ROOT / "host-npu" / "host_npu" / "_lib" / "include"
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    others = _torch_npu.library().parents[1] / "include"
    # The location of the ABI headers that torch_npu includes depends on its version.
    folders = [others, others / "third_party" / "acl" / "inc"]
    includes = ["-I", str(headers), *(f"-isystem{folder}" for folder in folders)]
    source = tmp_path / "check.cpp"
    source.write_text(runpy.run_path(str(ROOT / "csrc" / "npu" / "aclnn_api_check.py"))["source"]())
    subprocess.run(["g++", *flags, *includes, source], check=True)

    header = headers / "aclnnop" / "aclnn_mse_loss_backward.h"
    (tmp_path / "aclnnop").mkdir()
    changed = header.read_text().replace("int64_t reduction", "int32_t reduction")
    (tmp_path / "aclnnop" / header.name).write_text(changed)
    refused = subprocess.run(["g++", *flags, "-I", str(tmp_path), *includes, source], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "aclnnMseLossBackwardGetWorkspaceSize has another signature in this CANN" in refused.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_custom_vendor_and_split_libraries_are_searched_in_order(tmp_path):
    # In a program without torch_npu, whose own search would take precedence.
    source, program, torch_folder = tmp_path / "search.cpp", tmp_path / "search", Path(torch.__file__).parent
    source.write_text(
        """
        #include <dlfcn.h>
        #include <iostream>
        #include "symbols.h"
        int main() {
            using namespace torch_aclnn_ops;
            Dl_info info;
            if (find_symbol("aclnnNothing") != nullptr || dladdr(find_symbol("aclnnMseLossBackward"), &info) == 0) {
                return 1;
            }
            std::cout << info.dli_fname;
        }
        """
    )
    npu_include = _torch_npu.library().parents[1] / "include"
    includes = [ROOT / "csrc" / "npu", torch_folder / "include", npu_include, npu_include / "third_party/acl/inc"]
    command = ["g++", "-std=c++20", source, ROOT / "csrc" / "npu" / "symbols.cpp", *(f"-I{path}" for path in includes)]
    command += [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ldl", "-o", program]
    subprocess.run(command, check=True)
    # A copy of the simulated operators in each folder where CANN's may be.
    places = [
        tmp_path / "custom" / "op_api" / "lib" / "libcust_opapi.so",
        tmp_path / "opp" / "vendors" / "one" / "op_api" / "lib" / "libcust_opapi.so",
        tmp_path / "cann" / "lib64" / "libopapi_a.so",
        tmp_path / "cann" / "lib64" / "libopapi_b.so",
    ]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(LIBRARIES / "libopapi.so", place)
    (tmp_path / "opp" / "vendors" / "config.ini").write_text("[section]\nload_priority = none, one\n")
    settings = {
        "ASCEND_CUSTOM_OPP_PATH": f"{tmp_path / 'nowhere'}:{tmp_path / 'custom'}",
        "ASCEND_OPP_PATH": str(tmp_path / "opp"),
        "ASCEND_HOME_PATH": str(tmp_path / "cann"),
    }
    found = []
    for place in places:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES), **settings}
        found.append(subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout)
        place.unlink()
    found.append(subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout)
    assert found == [*map(str, places), str(LIBRARIES / "libopapi.so")]
