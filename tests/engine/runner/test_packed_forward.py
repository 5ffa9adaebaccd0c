"""Tests of whole engines whose numbers travel by one copy a step, with interpreted kernels, against torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import Flight, StepPlan
from tests.engine.draft_head.eagle3 import Eagle3, make_head
from tests.engine.draft_head.test_head_drafter import check_chain, contexts, head_of
from tests.engine.flights import RunnerAround
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import Request, engine_of, run, weights
from tests.engine.random_models import make_base, reference_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]
TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
TORCH = dict.fromkeys(TRITON, "torch")
ADAPTERS = ("wide", "narrow")
REQUESTS = [
    Request(3, (AdapterUse("wide"),)),
    Request(9),
    Request(2, (AdapterUse("narrow"),)),
    Request(5, (AdapterUse("narrow", 0.5), AdapterUse("wide", -1.0))),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("packed") / "base", num_layers=1)


def source() -> CountingAdapterSource:
    made = (weights("wide", 12, 1), weights("narrow", 4, 2, targets=("q_proj", "down_proj")))
    return CountingAdapterSource({one.digest: one for one in made})


def engine(base: Path, **options: Any) -> Any:
    return engine_of(base, source(), max_batch_tokens=8, **options)


def test_a_packed_step_has_the_logits_of_torch(base: Path) -> None:
    """Prompts, chunks and decoding rows with one adapter, another, a mixture and none have torch's tokens and logits."""
    packed = engine(base, **TRITON)
    ours, plain = (run(one, ADAPTERS, REQUESTS, max_tokens=3) for one in (packed, engine(base, **TORCH)))

    assert type(packed.engine.runner.forward).__name__ == "PackedForward"
    assert ours.token_ids == plain.token_ids
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-4, rtol=1e-4)


class Plans(RunnerAround):
    """Counts the rows that were launched before their tokens were known."""

    num_awaiting = 0

    def launch(self, plan: StepPlan) -> Flight:
        self.num_awaiting += sum(piece.awaits_token for piece in plan.slices)
        return self.inner.launch(plan)


def test_overlapped_packed_steps_have_the_tokens_of_torch(base: Path) -> None:
    """With overlap, rows whose tokens the host does not know yet compute what torch computes without overlap."""

    def answers(overlaps: bool, **options: Any) -> tuple[list[list[int]], int]:
        driver = engine(base, overlap_steps=overlaps, max_draft_tokens=0, **options)
        plans = driver.loop.steps.runner = Plans(driver.engine.runner)
        outcomes = [driver.submit([5, 6, 7 + number], max_tokens=6, ignore_eos=True) for number in range(3)]
        driver.finish()
        return [outcome.token_ids for outcome in outcomes], plans.num_awaiting

    ours, num_awaiting = answers(True, **TRITON)
    assert ours == answers(False, **TORCH)[0]
    assert num_awaiting >= 9


def test_a_draft_head_reads_packed_steps(tmp_path: Path) -> None:
    """A head whose rows and attention are kernels too reads the states of packed steps: its guesses are the reference's."""
    base = make_base(tmp_path / "base", num_layers=3)
    layers: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    head = make_head(tmp_path / "head", base, head_dim=8, intermediate_size=48, **layers)
    driver = engine(base, draft_head=head, max_draft_tokens=4, **TRITON)
    model, reference = head_of(driver), Eagle3(head, reference_model(base, None))
    driver.submit([5, 6, 7, 8, 9, 10, 11], max_tokens=12, ignore_eos=True)

    checked = 0
    for _ in range(4):
        driver.step()
        checked += sum(check_chain(model, reference, context, 2) for _, context in contexts(driver))
    driver.finish()

    assert type(driver.engine.runner.forward).__name__ == "PackedForward"
    assert checked >= 6
