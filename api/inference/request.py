"""Defines `InferenceRequest`, the content of a valid request, and `ResponseHead`, the first fields of its answer.

Owns how a request becomes one generation for each answer. Never reserves quota or starts a generation: `job.py` does.
"""

from dataclasses import dataclass
from typing import Any

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.api.deps.resources import InferenceResources
from graftwork.engine.core.requests import KvLimits, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.constraints import FREE_OUTPUT, OutputPlan
from graftwork.sessions.generation.generator import GenerationRequest


def served_tier(principal: Principal, asked: str | None) -> str:
    """Returns the service tier of a request: the requested tier, but at most the tenant's highest tier.

    `auto` and None mean `default`.
    """
    return principal.capped_tier("default" if asked is None or asked == "auto" else asked)


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
    prediction_token_ids: tuple[int, ...] = ()
    """The tokens of the answer that the client expects. They change the speed, but never the output."""
    stop_logprobs: bool = False
    """Whether a stop token has log-probabilities, if the request asks for any."""
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
    def estimated_tokens(self) -> int:
        """The estimated usage in tokens: all prompts once, plus the expected tokens of every answer.

        When the request ends, the real usage replaces the estimate.
        """
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        return prompt_tokens + self.choices_per_prompt * self.expected_tokens

    def generation_requests(self, isolation: IsolationDomain, limits: KvLimits) -> list[GenerationRequest]:
        """Makes one generation request for each answer, in the order of the answers."""
        pairs = [(prompt, sampling) for prompt in self.prompts for sampling in self.samplings]
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
                prediction_token_ids=self.prediction_token_ids,
                grammar=self.output.grammar,
                stop_logprobs=self.stop_logprobs,
            )
            for choice, (prompt, sampling) in enumerate(pairs)
        ]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The first fields of an answer, such as the id and the model. All chunks of one stream have the same values."""

    answer_id: str
    created: int
    model: str
    """The model name that the client sent."""
    system_fingerprint: str
    """Identifies the weights that make the answer: an adapter version, or the base model."""
    service_tier: str
    """The tier that the server used. It may be lower than the requested tier."""

    @classmethod
    def of(cls, prefix: str, inference: InferenceRequest, resources: InferenceResources) -> "ResponseHead":
        """Makes the first fields of one answer.

        The answer's id is `prefix`, such as `chatcmpl-`, followed by the request's id without `req_`.
        """
        digest = inference.resolved.digest or resources.description.fingerprint
        return cls(
            answer_id=prefix + inference.request_id.removeprefix("req_"),
            created=int(resources.clock.now()),
            model=inference.resolved.requested,
            system_fingerprint="fp_" + digest.removeprefix("sha256:")[:12],
            service_tier=inference.tier,
        )

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.system_fingerprint,
        }
