"""Separates the reasoning of an answer from the answer itself.

Models that reason write it between two tags, such as `<think>` and `</think>`, before everything else. With some chat
templates the prompt itself ends with the opening tag, so that the answer begins inside the reasoning.
Owns the table of tags, the names by which chat templates switch reasoning, and the text that is held back because it
may be a tag.
Invariant: the result does not depend on how the text is cut into pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

from graftwork.engine.core.requests import ReasoningRule
from graftwork.platform.errors import InvalidRequest, ValidationFailed
from graftwork.sessions.text.stop_strings import StopStrings
from graftwork.sessions.text.tokenizer import TextTokenizer

AUTO_FORM, NO_FORM = "auto", "none"
"""The values of the setting `reasoning_form` that choose the tags by the chat template, and that choose none."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around the reasoning of one family of models."""

    open: str
    close: str

    def is_open_after(self, prompt_end: str) -> bool:
        """Returns whether an answer to a prompt with this end begins inside the reasoning."""
        return prompt_end.rstrip().endswith(self.open)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": ReasoningFormat("<think>", "</think>"),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
        "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
        "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
        "thinking": ReasoningFormat("<thinking>", "</thinking>"),
    }
)
"""By name, which the setting `reasoning_form` takes: `think` is that of Qwen, DeepSeek, GLM and SmolLM, `mistral` that of
Magistral, `cohere` that of Command A, `seed` that of Seed-OSS.
"""


def reasoning_format(template_source: str | None, chosen: str = AUTO_FORM) -> ReasoningFormat | None:
    """Returns the tags with the name `chosen`. If it is `auto`, returns the tags that the chat template has, both.

    Returns None if the template has none, or if `chosen` is `none`. Raises ValidationFailed for an unknown name.
    """
    if chosen == NO_FORM:
        return None
    if chosen != AUTO_FORM:
        if chosen not in REASONING_FORMATS:
            names = ", ".join((AUTO_FORM, NO_FORM, *REASONING_FORMATS))
            raise ValidationFailed(
                f"There is no form of reasoning named {chosen!r}: give one of {names}.", param="reasoning_form"
            )
        return REASONING_FORMATS[chosen]
    source = template_source or ""
    return next((form for form in REASONING_FORMATS.values() if form.open in source and form.close in source), None)


_PROMPT_END = 8
"""So many tokens at the end of a prompt show whether it ends with the opening tag."""
_SWITCHES = ("enable_thinking", "thinking")
"""The names in chat templates that turn reasoning on and off."""
_EFFORT = "reasoning_effort"


BUDGET_FIELD = "thinking_token_budget"
"""The field of a request with the most tokens of its reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningAsk:
    """What a request wants of the model's reasoning: that it is told from the answer, and a limit."""

    budget: int | None = None
    """The most tokens of reasoning; None sets no limit."""


@dataclass(frozen=True, slots=True)
class ReasoningPlan:
    """How one answer is split into reasoning and the answer itself."""

    form: ReasoningFormat | None = None
    """The tags; None if all output is the answer."""
    is_open: bool = False
    """Whether the output begins inside the reasoning."""
    rule: ReasoningRule | None = None
    """What the engine must know, for a budget or a grammar."""


NO_REASONING = ReasoningPlan()


def plan_reasoning(
    model: "ReasoningModel | None",
    ask: ReasoningAsk | None,
    tokenizer: TextTokenizer,
    prompt_token_ids: Sequence[int],
    *,
    has_grammar: bool,
) -> ReasoningPlan:
    """Returns how the answer to a prompt is split. `ask` is None for a request whose whole output is the answer.

    Raises InvalidRequest for a budget that cannot be kept.
    """
    if ask is None:
        return NO_REASONING
    if model is not None:
        return model.plan(ask, tokenizer, prompt_token_ids, has_grammar=has_grammar)
    if ask.budget is None:
        return NO_REASONING
    raise InvalidRequest(
        "This model's chat template shows no reasoning, so a budget for it cannot be kept: leave it out.",
        param=BUDGET_FIELD,
    )


@dataclass(frozen=True, slots=True)
class ReasoningModel:
    """How the served model reasons: its tags, their tokens, and what its chat template can switch."""

    form: ReasoningFormat
    open_token_id: int | None
    close_token_id: int | None
    """The tokens of the tags; None for a tag that is no token of its own."""
    gap_token_ids: tuple[int, ...] = ()
    """The tokens of line breaks, which models write behind the closing tag."""
    variables: frozenset[str] = frozenset()
    """The names that the chat template reads."""

    @classmethod
    def of(cls, form: ReasoningFormat, tokenizer: TextTokenizer, variables: frozenset[str]) -> "ReasoningModel":
        ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        breaks = [tokenizer.encode(text, allow_special=False, continues=True) for text in ("\n", "\n\n")]
        gap = tuple(dict.fromkeys(token_ids[0] for token_ids in breaks if len(token_ids) == 1))
        return cls(form, ids.get(form.open), ids.get(form.close), gap, variables)

    def plan(
        self,
        ask: ReasoningAsk,
        tokenizer: TextTokenizer,
        prompt_token_ids: Sequence[int],
        *,
        has_grammar: bool,
    ) -> ReasoningPlan:
        """Returns how the answer to a prompt is split. Raises InvalidRequest for a budget that cannot be kept."""
        end = tokenizer.decode(prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
        is_open, budget = self.form.is_open_after(end), ask.budget
        if budget is None and not has_grammar:
            return ReasoningPlan(self.form, is_open)
        if self.open_token_id is not None and self.close_token_id is not None:
            rule = ReasoningRule(self.open_token_id, self.close_token_id, is_open, budget, self.gap_token_ids)
            return ReasoningPlan(self.form, is_open, rule)
        if budget is None:
            return NO_REASONING  # the grammar holds from the first token on
        raise InvalidRequest(
            f"The tags of this model's reasoning, such as {self.form.close}, are no tokens of its vocabulary, so a budget "
            "cannot be kept: leave it out.",
            param=BUDGET_FIELD,
        )

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        """Returns the variables of the chat template for an effort such as `low`, or `none`; None says nothing.

        Names that the template does not read are left out.
        """
        if effort is None:
            return {}
        found = {_EFFORT: effort} | (switched(is_on=False) if effort == "none" else {})
        return {name: value for name, value in found.items() if name in self.variables}


def switched(*, is_on: bool) -> dict[str, Any]:
    """Returns the variables by which chat templates turn reasoning on or off."""
    return dict.fromkeys(_SWITCHES, is_on)


class ReasoningPiece(NamedTuple):
    """What a piece of text adds to the reasoning, and to the answer behind it."""

    reasoning: str
    answer: str


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class ReasoningSplitter:
    """Splits the text of one answer, which arrives in pieces.

    Line breaks around the reasoning are dropped, because chat templates write their own there.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        """`is_open` says whether the answer begins inside the reasoning."""
        self._form = form
        self._place = _Place.INSIDE if is_open else _Place.BEFORE
        self._closing = StopStrings((form.close,))
        self._held = ""
        """The text before the reasoning; inside it, line breaks that may be the last."""
        self._has_text = False
        """Whether the part in which the text is has a character besides line breaks."""
        self.num_inside = 0
        """The characters between the tags so far. Inside the reasoning, they may include the start of the closing tag."""

    @property
    def is_before(self) -> bool:
        """Whether it is not known yet if the answer has reasoning."""
        return self._place is _Place.BEFORE

    @property
    def is_inside(self) -> bool:
        """Whether the next characters belong to the reasoning."""
        return self._place is _Place.INSIDE

    @property
    def has_ended(self) -> bool:
        """Whether all text that follows is the answer's."""
        return self._place is _Place.AFTER and self._has_text

    def push(self, text: str) -> ReasoningPiece:
        """Reads the next piece of text. Holds back what may be part of a tag."""
        reasoning = ""
        if self._place is _Place.BEFORE:
            text = self._opened(text)
        if self._place is _Place.INSIDE:
            outcome = self._closing.push(text)
            reasoning = self._reasoned(outcome.text)
            self.num_inside += len(text)
            if outcome.matched is not None:
                self.num_inside -= len(outcome.matched) + len(outcome.rest)
                text = outcome.rest
                self._place, self._has_text, self._held = _Place.AFTER, False, ""
        return ReasoningPiece(reasoning, self._answered(text) if self._place is _Place.AFTER else "")

    def flush(self) -> ReasoningPiece:
        """Returns what was held back. Call this method after the last piece."""
        match self._place:
            case _Place.BEFORE:
                return ReasoningPiece("", self._held)
            case _Place.INSIDE:
                return ReasoningPiece(self._reasoned(self._closing.flush()), "")
            case _Place.AFTER:
                return ReasoningPiece("", "")

    def _opened(self, text: str) -> str:
        """Reads text before the reasoning. Returns what is behind the opening tag, or all if there is no such tag."""
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith(self._form.open):
            self._place, self._held = _Place.INSIDE, ""
            return begun.removeprefix(self._form.open)
        if self._form.open.startswith(begun):
            return ""
        self._place, self._has_text = _Place.AFTER, True
        held, self._held = self._held, ""
        return held

    def _reasoned(self, text: str) -> str:
        text = self._held + text if self._has_text else text.lstrip("\n")
        kept = text.rstrip("\n")
        self._has_text = self._has_text or bool(kept)
        self._held = text[len(kept) :]
        return kept

    def _answered(self, text: str) -> str:
        if not self._has_text:
            text = text.lstrip("\n")
            self._has_text = bool(text)
        return text
