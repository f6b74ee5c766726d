"""Which torch_npu goes with which torch: the pairs that ``make matrix`` tests."""

# Nothing is imported: make matrix reads this file without torch.

# Versions of torch with the newest torch_npu for each, oldest first.
PAIRS = {"2.9.1": "2.9.1", "2.12.0": "2.12.0.post3", "2.13.0": "2.13.0", "2.14.0": "2.14.0"}


def release(version: str) -> str:
    """Return a version without the build of torch (``+cpu``) or the later builds of torch_npu (``.post3``)."""
    return version.partition("+")[0].partition(".post")[0]


def how_to_install(torch_version: str) -> str:
    """Return the command that installs a torch_npu for this torch, or a tested pair if there is none for it.

    Args:
        torch_version: ``torch.__version__``.
    """
    installed = release(torch_version)
    if installed in PAIRS:
        return f"pip install torch_npu=={PAIRS[installed]}"
    newest = list(PAIRS)[-1]
    if _numbers(installed) > _numbers(newest):
        why = f"is newer than the newest with a tested torch_npu, {newest}"
    else:
        why = f"has no tested torch_npu; these have one: {', '.join(PAIRS)}"
    pair = f"pip install torch=={newest} torch_npu=={PAIRS[newest]}, because torch {torch_version} {why}"
    return f"{pair}; on a machine with an NPU, install the versions for its CANN, see docs/install.md"


def _numbers(version: str) -> list[int]:
    digits = ("".join(filter(str.isdigit, part)) for part in version.split("."))
    return [int(part) for part in digits if part]
