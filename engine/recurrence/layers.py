"""Computes the recurrent part of layers, between in_proj and out_proj, over a flat batch.

RecurrentLayers holds the weights and the states; StepRecurrence computes one step, layer by layer. The states are in the
pages of the KV cache (state_pages.py); step_states.py says which are read and written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.part_weights import RecurrentWeights
from graftwork.engine.recurrence.draft_inputs import DraftInputs, KeptDraftInputs
from graftwork.engine.recurrence.scan import Scan, apart, convolve, step_sizes
from graftwork.engine.recurrence.state_pages import LayerStates, StatePages
from graftwork.engine.recurrence.step_states import SlicePlan, page_before, plan_slice


class RecurrentLayers:
    """The recurrent layers of one model, and the states of all requests."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Sequence[RecurrentWeights],
        pages: StatePages,
        page_tokens: int,
        scan: Scan,
    ) -> None:
        """`weights` are those of the recurrent layers, in their order."""
        assert model.recurrence is not None
        self.config = model.recurrence
        self.epsilon = model.rms_norm_eps
        self.pages = pages
        self.weights = tuple(weights)
        self.scan = scan
        self.index_of = {layer: index for index, layer in enumerate(self.config.layers)}
        self.drafts = KeptDraftInputs()
        self._page_tokens = page_tokens

    def plan(self, batch: AttentionBatch) -> "StepRecurrence":
        """Prepares one step. Copies states to the pages that the step begins.

        Raises LoadFailed if a state that is being loaded did not arrive.
        """
        self.pages.wait()
        runs = list[_Run]()
        for one in batch.placed:
            plan = plan_slice(one, self.drafts.take(one.piece), self._page_tokens)
            before, first = page_before(plan, self._page_tokens), plan.segments[0].page
            if before is not None:
                self.pages.copy(before, first)
            elif one.piece.start == 0:
                self.pages.clear(first)
            runs.append(_Run(plan, self.drafts.keep(one.piece) if plan.num_drafts else None))
        return StepRecurrence(self, runs)


@dataclass(frozen=True, slots=True)
class _Run:
    """The recurrence of one slice, and the entry that takes the inputs of its drafts."""

    plan: SlicePlan
    drafts: DraftInputs | None


class StepRecurrence:
    """Computes the recurrent layers of one step. Each layer must be computed once, in order."""

    def __init__(self, owner: RecurrentLayers, runs: list[_Run]) -> None:
        self._owner = owner
        self._runs = runs
        self._replays = any(run.plan.num_replayed for run in runs)
        decodes = all(run.plan.num_inputs == 1 for run in runs)
        self._pages = torch.tensor([run.plan.segments[0].page for run in runs]) if decodes and len(runs) > 1 else None
        """The page of each request, if each has one token, so that their inputs are convolved together."""

    def mix(self, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """Advances the states of one layer, and returns what its tokens read from them, ready for out_proj.

        projected: [num_rows, input_width], the outputs of in_proj with adapters. Returns [num_rows, width] in the same
        dtype; rows of padding are zeros.
        """
        owner, config = self._owner, self._owner.config
        index = owner.index_of[layer]
        weights, states = owner.weights[index], owner.pages.layers[index]
        gate = projected[:, : config.width]
        inputs = self._inputs(index, projected[:, config.width :])  # fp32 [num_inputs, conv_width + heads]
        mixed = functional.silu(apart(self._convolved(inputs[:, : config.conv_width], weights, states)))
        sizes, decays = step_sizes(inputs[:, config.conv_width :], weights)
        values = mixed[:, : config.width].view(-1, config.num_heads, config.head_dim)
        B, C = mixed[:, config.width :].view(-1, 2, config.num_groups, config.state_size).unbind(1)
        y = torch.empty_like(values, memory_format=torch.contiguous_format)  # [num_inputs, heads, head_dim]
        self._scan(states, (decays, values * sizes[:, :, None], B, C, y))
        y += weights.skip * values
        own = self._own_rows(y.flatten(1), len(projected))
        gated = own * functional.silu(apart(gate))
        size = config.width // config.num_groups
        normed = functional.rms_norm(gated.view(-1, config.num_groups, size), (size,), eps=owner.epsilon)
        return normed.flatten(1).to(projected.dtype) * weights.norm

    def _inputs(self, index: int, projected: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of all slices: replayed tokens, then each slice's own. Keeps those of drafts."""
        own = projected.float()
        for run in self._runs:
            if run.drafts is not None:
                end = run.plan.first_row + run.plan.num_rows
                run.drafts.by_layer.append(own[end - run.plan.num_drafts : end].clone())
        if not self._replays:
            return own[: self._num_rows]
        parts = list[torch.Tensor]()
        for run in self._runs:
            plan = run.plan
            if plan.replayed is not None:
                parts.append(plan.replayed.by_layer[index][: plan.num_replayed])
            parts.append(own[plan.first_row : plan.first_row + plan.num_rows])
        return torch.cat(parts)

    def _convolved(self, inputs: torch.Tensor, weights: RecurrentWeights, states: LayerStates) -> torch.Tensor:
        """Returns the convolution of all inputs, and leaves each page's last inputs in its state."""
        if self._pages is not None:
            window = torch.cat([states.inputs[self._pages].transpose(0, 1), inputs[None]])  # [conv_tokens, rows, ...]
            states.inputs[self._pages] = window[1:].transpose(0, 1)
            return convolve(window, weights)[0]
        parts, start = list[torch.Tensor](), 0
        for run in self._runs:
            plan = run.plan
            before = states.inputs[plan.segments[0].page]  # [conv_tokens - 1, conv_width]
            window = torch.cat([before, inputs[start : start + plan.num_inputs]])
            parts.append(convolve(window, weights))
            for segment in plan.segments:
                states.inputs[segment.page] = window[segment.end : segment.end + len(before)]
            start += plan.num_inputs
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _scan(self, states: LayerStates, rows: tuple[torch.Tensor, ...]) -> None:
        """Runs each slice through its pages, and its drafts through a copy. `rows` are the last arguments of a Scan."""
        scan, start = self._owner.scan, 0
        for run in self._runs:
            plan, heads = run.plan, states.heads[run.plan.segments[0].page]
            for number, segment in enumerate(plan.segments):
                if number:
                    heads = states.heads[segment.page].copy_(heads)
                scan(heads, *(part[start + segment.start : start + segment.end] for part in rows))
            if plan.num_drafts:
                drafted = slice(start + plan.num_kept, start + plan.num_inputs)
                scan(heads.clone(), *(part[drafted] for part in rows))
            start += plan.num_inputs

    def _own_rows(self, y: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Returns the rows of the step: those of replayed tokens left out, rows of zeros added as padding."""
        if not self._replays and len(y) == num_rows:
            return y
        own = y.new_zeros(num_rows, y.shape[1])
        start = 0
        for run in self._runs:
            plan = run.plan
            own[plan.first_row : plan.first_row + plan.num_rows] = y[
                start + plan.num_replayed : start + plan.num_inputs
            ]
            start += plan.num_inputs
        return own

    @property
    def _num_rows(self) -> int:
        """The number of rows of the step, without padding."""
        return sum(run.plan.num_rows for run in self._runs)
