"""The arrangement of rows by expert, for random choices, against a plain loop."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.experts.expert_loop import LoopRows, run_length
from graftwork.engine.experts.routes import Routes
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.layers import Linear

NUM_EXPERTS, HIDDEN = 7, 16
CHOICES = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.permutations(range(NUM_EXPERTS)).map(lambda order: order[:count]), min_size=1, max_size=9)
)
"""The experts of each token: as many for all, and none twice."""


class PackedLinear(Linear):
    """A layer that says that its weight is in blocks, on any machine."""

    __slots__ = ()

    @property
    def is_packed(self) -> bool:
        return True


@given(chosen=CHOICES)
def test_each_expert_gets_the_rows_that_chose_it(chosen: list[list[int]]) -> None:
    """Each choice has a row of its own in the run of its expert; rows of an expert are in the order of their tokens."""
    routes = Routes.of(torch.tensor(chosen), torch.ones(len(chosen), len(chosen[0])), lambda count: count + 2)

    by_row = {
        int(routes.places[token, choice]): (expert, token)
        for token, experts in enumerate(chosen)
        for choice, expert in enumerate(experts)
    }
    assert len(by_row) == sum(map(len, chosen))
    assert [run.expert for run in routes.runs] == sorted({expert for experts in chosen for expert in experts})
    for run in routes.runs:
        own = [by_row[row] for row in range(run.start, run.end) if row in by_row]
        assert own == [(run.expert, token) for token, experts in enumerate(chosen) if run.expert in experts]
        assert run.end - run.start == len(own) + 2
    assert all(int(routes.tokens[row]) == token for row, (_, token) in by_row.items())
    found = zip(routes.host.rows, zip(routes.host.experts, routes.host.tokens, strict=True), strict=True)
    assert [(int(row), (int(expert), int(token))) for row, (expert, token) in found] == sorted(by_row.items())


@given(chosen=CHOICES, seed=st.integers(0, 9))
def test_outputs_are_summed_by_their_weights(chosen: list[list[int]], seed: int) -> None:
    """A token's result is the weighted sum of its experts' products, whatever padding the runs have."""
    generator = torch.Generator().manual_seed(seed)
    linears = [Linear(torch.randn(HIDDEN, HIDDEN, generator=generator)) for _ in range(NUM_EXPERTS)]
    x = torch.randn(len(chosen), HIDDEN, generator=generator)
    weights = torch.rand(len(chosen), len(chosen[0]), generator=generator)
    routes = Routes.of(torch.tensor(chosen), weights, run_length(BatchInvariance(4, 16), linears))
    rows = LoopRows({"down": tuple(linears)}, routes, np.zeros(len(routes.tokens), bool))

    mixed = rows.combined(rows.multiply(x[rows.tokens], "down"))

    for token, experts in enumerate(chosen):
        products = [weights[token, place] * (linears[expert].weight @ x[token]) for place, expert in enumerate(experts)]
        torch.testing.assert_close(mixed[token], torch.stack(products).sum(dim=0), atol=1e-4, rtol=1e-4)


def test_a_run_is_as_long_as_its_products_need() -> None:
    """Runs have at least the rows of BatchInvariance; with weights in blocks, a length that is prepared anyway. Quantised
    layers need no padding."""
    plain = run_length(BatchInvariance(4, 1), [Linear(torch.ones(16, 16))])
    packed = run_length(BatchInvariance(1, 1), [PackedLinear(torch.ones(16, 16))])
    quantised = run_length(BatchInvariance(4, 1), [])

    assert [plain(count) for count in (1, 4, 33)] == [4, 4, 33]
    assert [packed(count) for count in (1, 17, 33, 65)] == [1, 18, 36, 72]
    assert np.all([packed(count) >= count for count in range(1, 300)])
    assert [quantised(count) for count in (1, 5)] == [1, 5]
