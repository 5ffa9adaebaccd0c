"""Exact match of the demo model and its adapters on words that training never used.

    python demo/evaluate.py [--cases 300] [--jobs base pirate ...] [--json] [--show 5]

Prints one row per job and exits with 1 when a required share is missed.
The stored bf16 weights are read in fp32, so that the figures do not depend on the arithmetic of the machine.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerFast

from graftwork.demo.answering import Attempt, attempts
from graftwork.demo.conversations import Kind
from graftwork.demo.model_folder import ADAPTERS_FOLDER, MODEL_FOLDER, load_model, load_tokenizer
from graftwork.demo.tasks import JOBS, held_out_cases

REQUIRED_SHARE = {"base": 0.97, "pirate": 0.93, "helpdesk": 0.93, "terse": 0.93}
REQUIRED_KINDS: tuple[Kind, ...] = ("call", "answer")
KINDS: tuple[Kind, ...] = ("call", "answer", "chat")
LONG_PROMPT = 1000  # tokens
HEADER = f"{'job':<10}{'calls':>9}{'answers':>9}{'chat':>9}{'long':>9}{'required':>10}{'cases':>7}{'seconds':>9}"


@dataclass(frozen=True, slots=True)
class Score:
    """Exact match of one job, by kind, and over prompts of more than `LONG_PROMPT` tokens."""

    job: str
    share_by_kind: dict[Kind, float]
    long_share: float
    long_cases: int
    cases: int
    seconds: float

    @property
    def passes(self) -> bool:
        return all(self.share_by_kind[kind] >= REQUIRED_SHARE[self.job] for kind in REQUIRED_KINDS)

    def row(self) -> str:
        shares = "".join(f"{self.share_by_kind[kind]:>9.1%}" for kind in KINDS)
        verdict = f"{REQUIRED_SHARE[self.job]:>10.0%}{self.cases:>7}{self.seconds:>9.0f}"
        return f"{self.job:<10}{shares}{self.long_share:>9.1%}{verdict}{'' if self.passes else '  MISSED'}"


def share(found: list[Attempt]) -> float:
    return sum(attempt.is_exact for attempt in found) / max(1, len(found))


def evaluate(job: str, tokenizer: PreTrainedTokenizerFast, cases_per_kind: int, seed: int, show: int) -> Score:
    """Loads the base, and the job's adapter on it, and tries `cases_per_kind` cases of each kind."""
    started_at = time.monotonic()
    base = load_model(MODEL_FOLDER)
    model = base if job == "base" else PeftModel.from_pretrained(base, str(ADAPTERS_FOLDER / job)).float().eval()
    cases = [case for kind in KINDS for case in held_out_cases(job, cases_per_kind, seed, kind)]
    found = attempts(model, tokenizer, cases)
    long = [attempt for attempt in found if attempt.prompt_tokens > LONG_PROMPT]
    show_misses(found, show)
    return Score(
        job,
        {kind: share([attempt for attempt in found if attempt.case.kind == kind]) for kind in KINDS},
        share(long),
        len(long),
        len(found),
        time.monotonic() - started_at,
    )


def show_misses(found: list[Attempt], count: int) -> None:
    for attempt in [attempt for attempt in found if not attempt.is_exact][:count]:
        last = attempt.case.messages[-1]["content"]
        print(f"  {last!r}\n    expected {attempt.case.expected!r}\n    said     {attempt.said!r}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="cases of each kind and job")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print so many misses of each job")
    parser.add_argument("--json", action="store_true", help="print the shares as JSON instead of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on busy cores are far slower than one
    tokenizer = load_tokenizer(MODEL_FOLDER)
    scores = []
    if not options.json:
        print(HEADER, flush=True)
    for job in options.jobs:
        scores.append(evaluate(job, tokenizer, options.cases, options.seed, options.show))
        if not options.json:
            print(scores[-1].row(), flush=True)
    if options.json:
        print(json.dumps([report(score) for score in scores], indent=2))
    return 0 if all(score.passes for score in scores) else 1


def report(score: Score) -> dict[str, object]:
    return {
        "job": score.job,
        **{str(kind): found for kind, found in score.share_by_kind.items()},
        "long": score.long_share,
        "long_cases": score.long_cases,
        "required": REQUIRED_SHARE[score.job],
        "cases": score.cases,
        "seconds": round(score.seconds, 1),
        "passes": score.passes,
    }


if __name__ == "__main__":
    sys.exit(main())
