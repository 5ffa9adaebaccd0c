"""What quantised weights and quantised KV cost the demo model: exact answers, and how far its expectations move.

    python benchmarks/quantised_answers.py [--cases 60] [--forms plain,int8,int4,…] [--json OUT]

Every form answers the same cases as `demo/evaluate.py`, through the engine in fp32, for the base and for its three
adapters, and reads the base's conversations once more for the figures of `graftwork model check`: the mean KL divergence
from the plain model and the share of equal greedy tokens. A form is the weights and the KV: `int4+kv int8`.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import CONFIG_NAME, WEIGHTS_NAME, LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.demo.answering import MAX_NEW_TOKENS, prompt_of
from graftwork.demo.model_folder import ADAPTERS_FOLDER, MODEL_FOLDER, load_tokenizer
from graftwork.demo.tasks import Case, held_out_cases
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.evaluation.comparison import DivergenceMeter, LikelihoodMeter, ParentRows
from graftwork.engine.evaluation.text_scorer import TextScorer
from graftwork.engine.kv.index.cost_model import UNMEASURED, CostTracker
from graftwork.engine.messages import SubmitRequest
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId

JOBS = ("base", "pirate", "helpdesk", "terse")
FORMS = ("plain", "int8", "int4", "plain+kv int8", "plain+kv fp8", "int8+kv int8")


@dataclass(frozen=True, slots=True)
class Figures:
    """One form: the share of exact answers by job, and the distance of the base from the plain model."""

    form: str
    exact_by_job: dict[str, float]
    mean_kl: float
    agreement: float


def config_of(form: str) -> EngineConfig:
    weights, _, kv = form.partition("+kv ")
    return EngineConfig(
        model=MODEL_FOLDER,
        dtype="float32",
        device="cpu",
        device_bytes=128 * 2**20,
        host_kv_bytes=0,
        quantization=None if weights == "plain" else weights,
        kv_dtype=kv or "auto",
    )


class DemoEngine:
    """An engine with the demo's adapters."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.digests: dict[str, str] = {}
        self._folder = folder
        self._engine: Engine = build_engine(config, self._source, costs=CostTracker(UNMEASURED))
        self._texts: dict[RequestId, list[int]] = {}
        self._left: set[RequestId] = set()

    def _source(self, description: EngineDescription) -> ArtifactAdapterSource:
        store = LocalArtifacts(self._folder)
        for job in JOBS[1:]:
            config, path = (ADAPTERS_FOLDER / job / CONFIG_NAME).read_bytes(), ADAPTERS_FOLDER / job / WEIGHTS_NAME
            _, self.digests[job] = identify_adapter(config, path.read_bytes(), description)
            with path.open("rb") as file:
                store.put(self.digests[job], AdapterFiles(config, file))
        return ArtifactAdapterSource(LocalArtifacts(self._folder), description)

    def answer(self, job: str, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Returns the greedy answers to some prompts."""
        loop, adapters = self._engine.loop, () if job == "base" else (AdapterUse(self.digests[job]),)
        ids = [RequestId(f"{job} {number}") for number in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            sampling = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0)
            request = EngineRequest(request_id, tuple(prompt), sampling, IsolationDomain(b"demo"), adapters=adapters)
            self._texts[request_id] = []
            self._left.add(request_id)
            loop.take(SubmitRequest(request, self._hear))
        while self._left:
            while not loop.inbox.empty():
                loop.take(loop.inbox.get())
            if not loop.step() and self._left:
                loop.take(loop.inbox.get(timeout=60))
        return [self._texts[request_id] for request_id in ids]

    def _hear(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if isinstance(output.event, GraftworkError):
                raise output.event
            if isinstance(output.event, TokensGenerated):
                self._texts[output.request_id] += output.event.token_ids
            if output.is_last:
                self._left.discard(output.request_id)


def exact_share(engine: DemoEngine, tokenizer: PreTrainedTokenizerFast, job: str, cases: list[Case]) -> float:
    answers = engine.answer(job, [prompt_of(tokenizer, case) for case in cases])
    said = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(text == case.expected for text, case in zip(said, cases, strict=True)) / len(cases)


def measure(forms: Sequence[str], num_cases: int, folder: Path) -> list[Figures]:
    tokenizer = load_tokenizer(MODEL_FOLDER)
    cases = {job: held_out_cases(job, num_cases, seed=1) for job in JOBS}
    texts = [
        (prompt_of(tokenizer, case) + tokenizer.encode(case.expected, add_special_tokens=False))[:2000]
        for case in cases["base"]
    ]
    parent = ParentRows(folder / "rows", LikelihoodMeter(texts).num_rows, len(tokenizer))
    scorer = TextScorer(config_of("plain"))
    scorer.score(texts, parent.put)
    scorer.close()
    found: list[Figures] = []
    for form in forms:
        scorer, meter = TextScorer(config_of(form)), DivergenceMeter(parent)
        scorer.score(texts, meter.take)
        scorer.close()
        engine, away = DemoEngine(config_of(form), folder), meter.figures()
        exact = {job: exact_share(engine, tokenizer, job, cases[job]) for job in JOBS}
        found.append(Figures(form, exact, away.mean_kl, away.agreement))
    return found


def show(found: Sequence[Figures]) -> None:
    table = Table("form", *JOBS, "mean KL", "agreement", box=None)
    for one in found:
        shares = [f"{share:.1%}" for share in one.exact_by_job.values()]
        table.add_row(one.form, *shares, f"{one.mean_kl:.5f}", f"{one.agreement:.4f}")
    Console(width=100).print(table)


def record_of(found: Sequence[Figures], num_cases: int) -> dict[str, Any]:
    """Returns what is kept of a run: the machine, the versions and the figures."""
    return {
        "benchmark": "quantised_answers",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__},
        "cases": num_cases,
        "forms": [asdict(one) for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60, help="cases of each job")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated forms")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.forms.split(","), options.cases, Path(folder))
    show(found)
    if options.json:
        options.json.write_text(json.dumps(record_of(found, options.cases), indent=1) + "\n")


if __name__ == "__main__":
    main()
