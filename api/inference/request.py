"""What a route asks to have generated, after its body was understood and before anything is reserved."""

from dataclasses import dataclass

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.constraints import FREE_ANSWER, AnswerPlan


@dataclass(frozen=True, slots=True)
class InferenceOrder:
    """Every prompt is answered once for each of its samplings; prompt by prompt, the answers count from 0."""

    request_id: RequestId
    principal: Principal
    resolved: ResolvedModel
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    """One for each choice of a prompt."""
    stop: tuple[str, ...]
    tier: str
    answer: AnswerPlan = FREE_ANSWER
    """How its answers are made and read."""
    prediction_token_ids: tuple[int, ...] = ()
    """What every answer is expected to be; it changes none."""
    expected_tokens: int = 0
    """How many tokens one choice is likely to make, for the estimate that is reserved."""

    @property
    def unenforced(self) -> tuple[str, ...]:
        """What of its schemas is let go."""
        return () if self.answer.grammar is None else self.answer.grammar.unenforced

    @property
    def choices_per_prompt(self) -> int:
        return len(self.samplings)

    @property
    def estimated_tokens(self) -> int:
        """Prompts once, and what every choice may add; settled later with what was really used."""
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        return prompt_tokens + len(self.prompts) * self.choices_per_prompt * self.expected_tokens
