"""The first call of a process may be traced, transformed, or one with fake tensors."""

import subprocess
import sys


def test_the_first_call_of_a_process_works_in_every_mode():
    done = subprocess.run([sys.executable, "-m", "tests.first_calls"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
