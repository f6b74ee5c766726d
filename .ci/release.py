"""Build what a release consists of, and check it: ``python .ci/release.py .release/bin/python``.

The source distribution and the wheel without compiled parts are built by the tools of the environment that is named,
which has no torch; the wheel with compiled parts is built beside the torch and torch_npu of this Python. All three go
to ``dist``, are checked by twine and check-wheel-contents, and installed in empty folders, from which each has to
train. The exit status is 0 if all is well.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def run(*command: object, **options: object) -> None:
    """Run a command that has to succeed."""
    subprocess.run([str(word) for word in command], check=True, **options)


def build(tools: str) -> tuple[Path, Path, Path]:
    """Build the source distribution, the wheel that is made of it, and the wheel with compiled parts."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(tools, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT, stdout=subprocess.DEVNULL)
    for stale in (ROOT / "build").glob("lib*"):  # setuptools would pack what has been deleted since
        shutil.rmtree(stale)
    [sdist], [pure] = DIST.glob("*.tar.gz"), DIST.glob("*-none-any.whl")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", DIST, ROOT)
    [compiled] = set(DIST.glob("*.whl")) - {pure}
    return sdist, pure, compiled


def check_installed(archive: Path, version: str, device: str, installer: str) -> None:
    """Install an archive in an empty folder, and train from there."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            *(installer, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--target", Path(folder, "site"), archive),
        )
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        runner = ["-m", "host_npu"] if device == "npu" else []
        site = str(Path(folder, "site"))
        environment = {"PYTHONPATH": site, "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        run(sys.executable, *runner, program, site, version, device, cwd=folder, env=environment)
    print(f"{archive.name}: installed, and trains on {device}")


def main(tools: str) -> int:
    """Build and check everything; return the exit status."""
    version = re.search(r'__version__ = "(.*)"', (ROOT / "torch_aclnn_ops/_version.py").read_text())[1]
    sdist, pure, compiled = build(tools)
    run(tools, "-m", "twine", "check", "--strict", sdist, pure, compiled)
    run(Path(tools).with_name("check-wheel-contents"), pure, compiled)
    # What is installed from the source distribution is compiled where torch is, which takes minutes: here it is not.
    check_installed(sdist, version, "cpu", tools)
    check_installed(pure, version, "cpu", sys.executable)
    check_installed(compiled, version, "cpu", sys.executable)
    check_installed(compiled, version, "npu", sys.executable)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
