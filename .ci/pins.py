"""Pin what CI installs, with hashes, in ``.ci/requirements.txt``: ``make pins``.

Pinned are the tools: linters, the documentation's, pytest and what compiles, each with all that it needs. Not pinned by
hashes are torch and torch_npu, whose builds (for a CPU, for CUDA, of a mirror) are different files of one version, and
the packages that need them, because pip takes hashes of all packages of a command or of none; pyproject.toml has their
versions.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / ".ci" / "requirements.txt"
EXTRAS = (("host-npu", "test"), ("host-npu", "lint"), (".", "docs"))
COMPILING = ("setuptools>=77", "ninja")
# Newer ones need Python 3.11.5, and Debian 12 has 3.11.2.
OLDER = ("pymdown-extensions<13",)
HEADER = """\
# What CI installs besides torch, torch_npu and packages that need them: made by `make pins` with Python {python}, whose
# dependencies they are. .ci/run installs it with --require-hashes; another registry has the same files, or pip refuses.
"""


def tools() -> list[str]:
    """Return the requirements of the tools, as pyproject.toml has them."""
    found = {*COMPILING, *OLDER}
    for project, extra in EXTRAS:
        lines = (ROOT / project / "pyproject.toml").read_text().splitlines()
        [line] = [line for line in lines if line.startswith(f"{extra} = [")]
        found.update(re.findall(r'"([^"]+)"', line))
    return sorted(found)


def main(compiler: str) -> None:
    """Write the file, by pip-compile, which keeps the versions that it has unless they do not fit any more."""
    options = ["--quiet", "--strip-extras", "--generate-hashes", "--allow-unsafe", "--no-header", "--no-annotate"]
    options += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options"]
    command = [compiler, *options, "--output-file", str(PINS), "-"]
    subprocess.run(command, input="\n".join(tools()), text=True, check=True)
    header = HEADER.format(python=".".join(map(str, sys.version_info[:2])))
    PINS.write_text(header + PINS.read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
