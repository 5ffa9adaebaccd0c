"""Defines `InferenceRequest`, the content of a valid request for text, whatever API it came by.

Owns how a request becomes one generation for each answer. Never runs anything: `InferenceJob` does.
"""

from dataclasses import dataclass
from itertools import product

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.api.deps.resources import InferenceResources
from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.requests import KvLimits, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.activity.meter import RequestOwner
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.constraints import FREE_OUTPUT, OutputPlan
from graftwork.sessions.generation.early_refusal import EarlyRefusal
from graftwork.sessions.generation.reasoning import ReasoningAsk
from graftwork.sessions.generation.request import GenerationRequest
from graftwork.sessions.generation.usage import Expected


def served_tier(principal: Principal, asked: str | None) -> str:
    """Returns the service tier of a request: the requested tier, but at most the tenant's highest tier.

    `auto` and None mean `default`.
    """
    return principal.capped_tier("default" if asked is None or asked == "auto" else asked)


def refuse_early(resources: InferenceResources, principal: Principal, resolved: ResolvedModel, tier: str) -> None:
    """Raises CapacityContended if the engine would refuse the request, whatever its prompt. Call it before the prompt is
    read.
    """
    early = EarlyRefusal(resources.generator, resources.accounting, resources.pepper)
    early.check(principal, tier, resolved.adapters)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request with one or more prompts. Each prompt gets one answer for each entry of `samplings`.

    The answers are numbered from 0: first all answers to the first prompt, then all answers to the second, and so on.
    """

    request_id: RequestId
    principal: Principal
    resolved: ResolvedModel
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    """The sampling parameters of the answers to each prompt: one entry for each answer."""
    stop: tuple[str, ...]
    tier: str
    output: OutputPlan = FREE_OUTPUT
    """The constraints on the answers, and how to parse them."""
    pooling: Pooling | None = None
    """Asks for the embeddings of the prompts, and for no answers."""
    at_once: int | None = None
    """How many of the prompts the engine gets at a time; None gives it all of them."""
    cache_ttl_s: float | None = None
    """For how many seconds another request is likely to begin with these prompts; see EngineRequest."""
    prediction_token_ids: tuple[int, ...] = ()
    """The tokens of the answer that the client expects. They change the speed, but never the output."""
    stop_logprobs: bool = False
    """Whether a stop token has log-probabilities, if the request asks for any."""
    reasoning: ReasoningAsk | None = None
    """What is wanted of the model's reasoning; None means that all output is the answer."""
    expected_tokens: int = 0
    """The expected number of tokens in one answer to each prompt, summed over the prompts.

    The quota reserves this number once for each choice.
    """

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The parts of the client's JSON Schemas that the server does not enforce.

        Each part is the name of a request field and a JSON pointer into its schema, such as
        `tools[0].function.parameters#/properties/id/format`.
        """
        return () if self.output.grammar is None else self.output.grammar.unenforced

    @property
    def choices_per_prompt(self) -> int:
        return len(self.samplings)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.choices_per_prompt

    @property
    def expected(self) -> Expected:
        """What the request is expected to use: all prompts once, and the tokens of every answer.

        When the request ends, the real usage replaces the estimate.
        """
        prompt_tokens = sum(map(len, self.prompts))
        return Expected(
            tokens=prompt_tokens + self.choices_per_prompt * self.expected_tokens,
            answers=self.num_answers,
            prompt_tokens=prompt_tokens,
            max_output_tokens=len(self.prompts) * sum(sampling.max_tokens for sampling in self.samplings),
        )

    def _is_due(self, choice: int) -> bool:
        """Returns whether the client's deadline is for this answer: it is for the first of each prompt that begins at once."""
        return choice % self.choices_per_prompt == 0 and (self.at_once is None or choice < self.at_once)

    def generation_requests(self, isolation: IsolationDomain, limits: KvLimits) -> list[GenerationRequest]:
        """Makes one generation request for each answer, in the order of the answers."""
        pairs = product(self.prompts, self.samplings)
        return [
            GenerationRequest(
                request_id=RequestId(f"{self.request_id}.{choice}"),
                prompt_token_ids=prompt,
                sampling=sampling,
                stop=self.stop,
                resolved=self.resolved,
                isolation=isolation,
                weight=self.principal.weight,
                tier=ServiceTier(self.tier),
                parse_tool_calls=self.output.calls_tools,
                parallel_tool_calls=self.output.parallel_tool_calls,
                kv_limits=limits,
                cache_ttl_s=self.cache_ttl_s,
                pooling=self.pooling,
                prediction_token_ids=self.prediction_token_ids,
                grammar=self.output.grammar,
                stop_logprobs=self.stop_logprobs,
                reasoning=self.reasoning,
                owner=RequestOwner(self.principal.tenant_id, self.resolved.adapter_label),
                due_at=self.principal.first_token_due_at if self._is_due(choice) else None,
                trace=self.principal.trace,
            )
            for choice, (prompt, sampling) in enumerate(pairs)
        ]
