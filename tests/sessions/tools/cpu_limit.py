"""Runs hostile input in a process that the system ends after a few seconds of CPU.

The limit counts the CPU of the process alone, so that a busy machine does not fail a test.
"""

import subprocess
import sys

CPU_S = 5
LIMIT = f"import resource; resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))\n"


def printed_within_limit(program: str) -> str:
    """Returns what a Python program prints. Fails the test if the program raises, or needs more than CPU_S seconds.

    The program sets its own limit: a `preexec_fn` would fork the test process, which is refused where that is large.
    """
    done = subprocess.run([sys.executable, "-c", LIMIT + program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout
