"""Turns an order into a running job: reserves for it, starts it, and sees to its settlement.

The one way from a route to the engine, so nothing is generated that was not reserved and is not metered.
"""

from graftwork.api.deps.resources import Resources
from graftwork.api.inference.job import Generation, InferenceJob, Settle
from graftwork.api.inference.quota_gate import kv_limits_of
from graftwork.api.inference.request import InferenceOrder
from graftwork.api.inference.usage import UsageFigures
from graftwork.engine.core.requests import KvLimits, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.errors import LimitExceeded
from graftwork.platform.ids import RequestId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.quotas.quotas import Reservation
from graftwork.platform.tenancy.metering import UsageEvent
from graftwork.sessions.generation.generator import GenerationRequest, Generator
from graftwork.sessions.generation.usage import TallyingEngine


async def start_inference(resources: Resources, order: InferenceOrder) -> InferenceJob:
    """Raises LimitExceeded before anything is generated; the engine's refusals come from the job."""
    quota = await resources.tenancy.get_quota(order.principal.tenant_id)
    reservation = await _reserve(resources, order, quota)
    pairs = [(prompt, sampling) for prompt in order.prompts for sampling in order.samplings]
    job = InferenceJob(
        order.request_id,
        [_generation(resources, order, choice, *pair, kv_limits_of(quota)) for choice, pair in enumerate(pairs)],
        order.choices_per_prompt,
        _settlement(resources, order, reservation),
        reservation.rate_limit_headers() | {"x-graftwork-model": order.resolved.label},
    )
    job.start(resources.tasks)
    return job


async def _reserve(resources: Resources, order: InferenceOrder, quota: Quota) -> Reservation:
    tenant_id = order.principal.tenant_id
    try:
        return await resources.quotas.reserve(tenant_id, quota, order.estimated_tokens)
    except LimitExceeded:
        resources.telemetry.count_request(tenant_id, "refused")
        raise


def _generation(
    resources: Resources,
    order: InferenceOrder,
    choice: int,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    kv_limits: KvLimits,
) -> Generation:
    isolation = order.principal.isolation(resources.pepper)
    request = GenerationRequest(
        request_id=RequestId(f"{order.request_id}.{choice}"),
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=order.stop,
        resolved=order.resolved,
        isolation=isolation,
        weight=order.principal.weight,
        tier=ServiceTier(order.tier),
        parse_tool_calls=order.answer.calls_tools,
        parallel_tool_calls=order.answer.parallel_tool_calls,
        kv_limits=kv_limits,
        prediction_token_ids=order.prediction_token_ids,
        grammar=order.answer.grammar,
    )
    tally = TallyingEngine(resources.engine)
    generator = Generator(tally, resources.tokenizer, resources.description, tool_call_form=resources.planner.form)
    return Generation(request, generator, tally)


def _settlement(resources: Resources, order: InferenceOrder, reservation: Reservation) -> Settle:
    """The ledger first: what was used must be in it before it leaves the tokens in flight."""

    async def settle(usage: UsageFigures | None, outcome: str) -> None:
        if usage is None:
            resources.telemetry.count_request(order.principal.tenant_id, outcome)
            await reservation.refund()
            return
        try:
            await _record(resources, order, usage, outcome)
        finally:
            await reservation.settle(usage.total_tokens)

    return settle


async def _record(resources: Resources, order: InferenceOrder, usage: UsageFigures, outcome: str) -> None:
    event = UsageEvent(
        request_id=order.request_id,
        tenant_id=order.principal.tenant_id,
        key_id=order.principal.key_id,
        model=order.resolved.requested,
        adapter=order.resolved.adapter_label,
        session_id=None,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        at=resources.clock.now(),
        outcome=outcome,
    )
    await resources.meter.record(event)
