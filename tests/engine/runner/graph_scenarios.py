"""What CUDA graphs must keep while an engine serves. The same scenarios run with real graphs on a GPU, and with
interpreted kernels and a recorder on a CPU.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.kernels.step_inputs import Passenger
from graftwork.engine.lora.triton.backend import StepOwners
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.engine.runner.forward import SampledTokens
from graftwork.engine.runner.graph_keys import EagerReason, GraphKey
from graftwork.engine.runner.input_batch import BatchRows
from graftwork.engine.runner.step_graphs import StepGraphs
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.lora.triton.engine_runs import VOCAB, weights

RANKS = {"a": 12, "b": 4, "c": 16, "d": 8, "e": 40}


def adapters(num_layers: int) -> dict[str, AdapterWeights]:
    """Adapters of several ranks, by name, for a base of `num_layers` layers."""
    named = enumerate(RANKS.items())
    return {name: weights(name, rank, seed, num_layers=num_layers) for seed, (name, rank) in named}


@dataclass
class CheckedGraphs:
    """Computes each step by its graph, and then once more by the same launches one by one. Asserts that both give the
    same bits. The second pass writes the KV of the step again, with the same content.
    """

    inner: StepGraphs
    steps: Counter[GraphKey] = field(default_factory=Counter)
    """How many steps each graph has computed."""
    rows: set[int] = field(default_factory=set)
    """The numbers of rows of these steps."""

    def key_for(self, rows: BatchRows, owners: StepOwners) -> GraphKey | EagerReason:
        return self.inner.key_for(rows, owners)

    def compute(
        self,
        key: GraphKey,
        rows: BatchRows,
        owners: StepOwners,
        tokens: SampledTokens | None,
        passenger: Passenger | None,
    ) -> torch.Tensor:
        logits = self.inner.compute(key, rows, owners, tokens, passenger)
        replayed = logits.clone()
        logits.fill_(float("nan"))
        self.inner.work_of(key)()
        assert torch.isfinite(replayed).all(), key
        assert torch.equal(logits, replayed), f"a replay of {key} differs from its launches"
        self.steps[key] += 1
        self.rows.add(len(rows.slices))
        return logits


def check_graphs(driver: EngineDriver) -> CheckedGraphs:
    """Lets the engine check each step that a graph computes."""
    forward = driver.engine.runner.forward
    checked = CheckedGraphs(forward.graphs)  # type: ignore[attr-defined]
    forward.graphs = checked  # type: ignore[attr-defined]
    return checked


def load(driver: EngineDriver, names: Sequence[str]) -> None:
    """Loads adapters, so that requests for them start together."""
    pool = driver.engine.adapters
    pool.want([(name,) for name in names])
    while any(not pool.is_ready(name) for name in names):
        driver.loop.take(driver.loop.inbox.get(timeout=60))
        pool.want([(name,) for name in names])


def serve(driver: EngineDriver, rounds: "Rounds", max_tokens: int) -> list[Outcome]:
    """Serves requests round by round. A request is the names of its adapters; several are a mixture.

    Their prompts have 1 to 9 tokens, and each answer is one token longer than the one before it, so that rows leave.
    """
    random, outcomes = Random(5), list[Outcome]()
    for names in rounds:
        for number, own in enumerate(names):
            prompt = [random.randrange(2, VOCAB) for _ in range(random.choice((1, 3, 4, 9)))]
            uses = tuple(AdapterUse(name, 1.0 if len(own) == 1 else 0.5) for name in sorted(own))
            answer = max_tokens + number
            outcomes.append(driver.submit(prompt, adapters=uses, max_tokens=answer, ignore_eos=True))
        driver.finish()
    errors = [one.error for one in outcomes if one.error is not None]
    assert not errors, errors
    return outcomes


Rounds = Sequence[Sequence[tuple[str, ...]]]
LEAVING: Rounds = ((("e",), ("a", "b"), ("c",), ()),)
"""One round, whose rows leave one by one: a large rank, a mixture, a smaller rank, the base."""
MIXED: Rounds = (
    *LEAVING,
    (("a",), (), ("b",)),
    (("c",), ("d",), (), ("a",), ("e",)),
    ((), ()),
    (("a", "b"), ("e",)),
    (("e",),),
)
"""Rounds of one to five rows: adapters of all ranks, the base alone, a mixture."""


def replays_have_the_bits_of_their_launches(
    driver: EngineDriver, rounds: Rounds, max_tokens: int
) -> tuple[list[Outcome], CheckedGraphs]:
    """Asserts that graphs compute all steps, those with prompts too, each with the bits of the same launches one by one."""
    load(driver, sorted({name for names in rounds for own in names for name in own}))
    checked = check_graphs(driver)
    before = driver.loop.stats()

    outcomes = serve(driver, rounds, max_tokens)

    stats = driver.loop.stats()
    mixed = sum(steps for key, steps in checked.steps.items() if key.is_mixed)
    assert checked.steps.total() == stats.steps - before.steps
    assert mixed == stats.graph_prompt_steps - before.graph_prompt_steps >= len(rounds)
    assert checked.steps.total() - mixed == stats.graph_steps - before.graph_steps
    assert checked.rows >= {1, 2, 3}
    loras = [key.lora for key in checked.steps if not key.is_mixed]
    assert None in loras
    assert {lora.is_general for lora in loras if lora is not None} == {True, False}
    assert len({lora.rank for lora in loras if lora is not None}) >= 2
    return outcomes, checked


def adapters_come_and_go(driver: EngineDriver, loads: Sequence[str], names: Sequence[str], max_tokens: int) -> None:
    """Serves adapters that do not fit together, one after the other. Asserts that graphs serve them, although they were
    evicted and loaded again. `loads` are those of the engine's source so far.
    """
    checked = check_graphs(driver)

    serve(driver, [((name,),) for name in names], max_tokens)

    assert len(loads) > len(set(names)), "no adapter was evicted"
    assert checked.steps.total() >= len(names) * (max_tokens - 1)
