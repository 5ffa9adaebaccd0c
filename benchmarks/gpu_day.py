"""Everything that is to be measured when a GPU is at hand, in nine minutes.

    PYTHONPATH=src python -m benchmarks.gpu_day --json OUT [--limit 540] [--shape llama-8b] [--phases steps,trace]
    PYTHONPATH=src python -m benchmarks.gpu_day --json OUT --dry-run

The phases and their seconds are listed in gpu/phases.py. Each runs in a process of its own, so that a phase that fails,
hangs or breaks the device costs no other phase. OUT is written anew after each phase, and has the rows of a phase up to
its failure. Weights and adapters are random. Needs torch, triton, numpy and safetensors, and nothing else.

`--dry-run` runs the host's side of every phase on the CPU, with a tiny model. OUT then has the same keys. The figures
that only a GPU can give are null.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # as when the file is run as a script
    from gpu.day import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
