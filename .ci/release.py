"""Build the archives of a release and check them: ``python .ci/release.py .release/bin/python``.

The source distributions of both projects and the wheel of torch_aclnn_ops without compiled parts are built with the
tools of the given environment, which has no torch; the wheels with compiled parts are built with this Python's torch
and torch_npu. All archives go to ``dist``, are checked by twine and check-wheel-contents, and are installed into empty
folders, where each must train. The exit status is 0 on success.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST_NPU = ROOT / "host-npu"
DIST = ROOT / "dist"

PROGRAM = """
import sys, torch_aclnn_ops, torch
from torch_aclnn_ops import doctor, functional
assert torch_aclnn_ops.__file__.startswith(sys.argv[1]), torch_aclnn_ops.__file__
assert torch_aclnn_ops.__version__ == sys.argv[2], torch_aclnn_ops.__version__
device = sys.argv[3]
x = torch.ones(2, device=device, requires_grad=True)
functional.mse_loss(x, torch.zeros(2, device=device)).backward()
assert x.grad.tolist() == [1, 1]
assert torch_aclnn_ops.launches().get("aclnnMseLossBackward", 0) == (device == "npu")
"""

ON_HOST_NPU = """
import sys, host_npu, torch
assert host_npu.__file__.startswith(sys.argv[1]), host_npu.__file__
assert host_npu.__version__ == sys.argv[2], host_npu.__version__
x = torch.ones(2, device="npu", requires_grad=True)
torch.nn.functional.mse_loss(x, torch.zeros(2, device="npu")).backward()
assert x.grad.tolist() == [1, 1]
assert host_npu.stats().launches["aclnnMseLossBackward"] == 1
"""


def run(*command: object, **options: object) -> None:
    """Run a command, which must succeed."""
    subprocess.run([str(word) for word in command], check=True, **options)


def version_of(package: Path) -> str:
    """Return the version that a package states."""
    return re.search(r'__version__ = "(.*)"', (package / "_version.py").read_text())[1]


def remove_stale(project: Path) -> None:
    """Remove setuptools' previous build, from which deleted files would be packed."""
    for folder in (project / "build").glob("lib*"):
        if folder.name.partition(".")[0] == "lib":
            shutil.rmtree(folder)


def build(tools: str, project: Path, *archives: str) -> list[Path]:
    """Build archives that need no compiler, sources first, and the wheel with compiled parts; return their paths."""
    remove_stale(project)
    before = set(DIST.glob("*"))
    run(tools, "-m", "build", "--no-isolation", *archives, "--outdir", DIST, project, stdout=subprocess.DEVNULL)
    without_compiler = sorted(set(DIST.glob("*")) - before, key=lambda path: path.suffix != ".gz")
    remove_stale(project)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", DIST, project)
    [compiled] = set(DIST.glob("*")) - before - set(without_compiler)
    return [*without_compiler, compiled]


def check_installed(archive: Path, installer: str, program: str, *arguments: str, on_npu: bool) -> None:
    """Install an archive into an empty folder, and train there."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            *(installer, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--target", Path(folder, "site"), archive),
        )
        path = Path(folder, "program.py")
        path.write_text(program)
        runner = ["-m", "host_npu"] if on_npu else []
        site = str(Path(folder, "site"))
        environment = {"PYTHONPATH": site, "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        run(sys.executable, *runner, path, site, *arguments, cwd=folder, env=environment)
    print(f"{archive.name}: installed, and trains on {'npu' if on_npu else 'cpu'}")


def main(tools: str) -> int:
    """Build and check everything; return the exit status."""
    shutil.rmtree(DIST, ignore_errors=True)
    sdist, pure, compiled = build(tools, ROOT)
    host_npu_sdist, host_npu = build(tools, HOST_NPU, "--sdist")
    run(tools, "-m", "twine", "check", "--strict", sdist, pure, compiled, host_npu_sdist, host_npu)
    run(Path(tools).with_name("check-wheel-contents"), pure, compiled, host_npu)
    version = version_of(ROOT / "torch_aclnn_ops")
    # Where torch is installed, a source distribution is compiled, which takes minutes, so it is tested without torch.
    for archive, installer in ((sdist, tools), (pure, sys.executable), (compiled, sys.executable)):
        check_installed(archive, installer, PROGRAM, version, "cpu", on_npu=False)
    check_installed(compiled, sys.executable, PROGRAM, version, "npu", on_npu=True)
    check_installed(host_npu, sys.executable, ON_HOST_NPU, version_of(HOST_NPU / "host_npu"), on_npu=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
