"""An inference request, after its body was read and before anything is reserved, and the head of its answer.

Owns how one request becomes the requests of its answers. Never reserves or starts anything: `job.py` does.
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
    """The service tier of a request: `auto` and None are the default tier, and the tenant's ceiling caps all."""
    return principal.capped_tier("default" if asked is None or asked == "auto" else asked)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Prompts, each answered once for each sampling. Answers are numbered from 0, prompt by prompt."""

    request_id: RequestId
    principal: Principal
    resolved: ResolvedModel
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    """One for each choice of a prompt."""
    stop: tuple[str, ...]
    tier: str
    output: OutputPlan = FREE_OUTPUT
    """How the answers are constrained and parsed."""
    prediction_token_ids: tuple[int, ...] = ()
    """The expected answer. It changes the speed, never the output."""
    expected_tokens: int = 0
    """How many tokens one choice is likely to make; reserved with the quota."""

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The places of the request's schemas that are not enforced."""
        return () if self.output.grammar is None else self.output.grammar.unenforced

    @property
    def choices_per_prompt(self) -> int:
        return len(self.samplings)

    @property
    def estimated_tokens(self) -> int:
        """Each prompt once, plus what every choice may add. Settled later with the real usage."""
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        return prompt_tokens + len(self.prompts) * self.choices_per_prompt * self.expected_tokens

    def generation_requests(self, isolation: IsolationDomain, limits: KvLimits) -> list[GenerationRequest]:
        """One for each answer, in order."""
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
            )
            for choice, (prompt, sampling) in enumerate(pairs)
        ]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that are equal in the answer, and in every chunk of its stream."""

    answer_id: str
    created: int
    model: str
    """The name that the client sent."""
    system_fingerprint: str
    """Identifies the weights that answered: the adapter version's, or the base model's."""
    service_tier: str
    """The tier that was served, which may be lower than the one asked for."""

    @classmethod
    def of(cls, prefix: str, inference: InferenceRequest, resources: InferenceResources) -> "ResponseHead":
        """The head of one answer. `prefix`, such as `chatcmpl-`, and the request's id make the answer's id."""
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
