"""Defines the interface of a sampler: from the logits of a step to its tokens. An engine chooses one sampler at its
start.

The runner calls `begin` before the forward pass, so that the parameters travel with its numbers, and the host fills
grammar masks while the device computes. It calls `sample` when the logits are computed, and `result` when it needs the
tokens on the host.

A row is the logits of one position of one request. Invariant: a row's token depends only on this row's logits and spec,
never on other rows or on their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.kernels.step_inputs import Passenger
from graftwork.platform.errors import GraftworkError


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens that one step has chosen, on the host."""

    token_ids: Sequence[int]
    """The token of each row."""
    logprobs: Sequence[TokenLogprobs | None]
    """The log probabilities of each row's token; None for a row whose request did not ask for them."""
    ends: Mapping[int, GraftworkError | None]
    """The rows for which the grammar allows no token. Their tokens must not be used.

    The value is None if the row's answer is complete, else the error that ends the request.
    """


@dataclass(frozen=True, slots=True)
class AwaitedTokens:
    """The tokens right before the sampled positions, where only the device knows them. The step before samples them."""

    token_ids: torch.Tensor  # [any number] int32 or int64, on the device
    sources: Sequence[int | None]
    """For each row of the step, where its awaited token is in `token_ids`; None if the host knows it."""


class Sampled(Protocol):
    """The tokens that one step chooses. The device may still be computing them."""

    @property
    def token_ids(self) -> torch.Tensor:
        """The token of each row, on the logits' device: [rows], int32 or int64. Reading it waits for nothing."""
        ...

    def result(self) -> SampledRows:
        """Waits for the device, and returns the tokens."""
        ...


class StepSampling(Protocol):
    """Samples the tokens of one step."""

    @property
    def passenger(self) -> Passenger | None:
        """The numbers that sampling needs on the device, which may travel with those of the forward pass.

        If nobody has taken them along by the time of `sample`, sampling sends them by itself. None if there are none.
        """
        ...

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Starts to choose one token for each row, and may change `logits` in place. Must be called once.

        Waits for the grammar masks of the step, which another thread fills. logits: [rows, vocab], in any floating
        dtype, with one row for each spec of the step.
        """
        ...


class Sampler(Protocol):
    """Samples the tokens of each step. Only the engine loop's thread calls it."""

    takes_awaited_tokens: bool
    """Whether `begin` can be called when only the device knows the last tokens, though penalties or grammars depend on
    them."""

    def begin(self, specs: Sequence[SampleSpec], awaited: AwaitedTokens | None = None) -> StepSampling:
        """Prepares the sampling of one step, before its forward pass. `specs` has one entry for each row.

        With `awaited`, the histories of the specs lack the awaited tokens. Their grammars must have them by the time of
        `sample`.
        """
        ...
