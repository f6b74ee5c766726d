"""Types of arguments for the command lines of the examples."""

import argparse
from collections.abc import Callable


def whole_number_from(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to 2**63 - 1, got {text!r}")
        return int(text)

    return parse
