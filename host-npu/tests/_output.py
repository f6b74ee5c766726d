"""What a program has printed."""

import json
from typing import Any


def read_json(output: str) -> Any:
    """Return the dictionary that a program has printed in a line of its own, before or after torch_npu's warnings."""
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
