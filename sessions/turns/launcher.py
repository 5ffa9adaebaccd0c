"""Plans the turns of sessions, and starts them: with new items, or once all outputs of a session's tool calls are stored.

Owns the engine request of each turn, the order in which a turn starts (plan, reserve quota, store, generate), and the
decision when the outputs of tool calls start the next turn. Never runs a turn, and never handles an HTTP request. A
client may send outputs in any order, and may send an output again; each output is stored once.
Invariants: a request reaches the engine only after its quota is reserved and its turn is stored. An accepted output is
never lost. If the turn that uses the outputs is refused or fails, a client that sends one of them again starts another
turn.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from graftwork.engine.core.requests import ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.session_commands import ToolWait
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.activity.meter import RequestOwner
from graftwork.platform.errors import Conflict, ContextLengthExceeded, InvalidRequest, NotFound, ValidationFailed
from graftwork.platform.ids import CallId, RequestId, TurnId, new_id
from graftwork.platform.ledger.usage import UsageOutcome
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.items import Item, function_call_output, parse_output
from graftwork.sessions.core.session import AgentSession, SessionSettings, ToolOutput
from graftwork.sessions.core.transcript import EMPTY_TRANSCRIPT, Transcript, TurnEncoder, truncated_opening
from graftwork.sessions.generation.constraints import OutputPlan
from graftwork.sessions.generation.early_refusal import EarlyRefusal
from graftwork.sessions.generation.reasoning import ReasoningAsk
from graftwork.sessions.generation.request import GenerationRequest, kv_limits
from graftwork.sessions.generation.usage import Charge, Expected, RequestAccount
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.tool_calls import AcceptedOutputs
from graftwork.sessions.text.encoding import Prompt
from graftwork.sessions.tools.tool_choice import call_forms
from graftwork.sessions.turns.kv import SessionKvClient
from graftwork.sessions.turns.runner import NO_HINTS, ToolHints, TurnDependencies, TurnPlan, TurnRunner
from graftwork.sessions.turns.running import RunningTurns, SessionLoader, TurnHandle, TurnReader, TurnTask, may_be_id
from graftwork.sessions.turns.settings import (
    NO_OVERRIDES,
    TurnOverrides,
    check_vocabulary,
    output_constraints,
    read_sampling,
    turn_budget,
)
from graftwork.sessions.turns.truncation import Truncation

Encode = Callable[[Prompt], Awaitable[tuple[int, ...]]]
"""Encodes a prompt for one tenant. Raises ContextLengthExceeded if the context has fewer tokens than the prompt."""


class TurnLauncher:
    """Plans and starts the turns of sessions, for all tenants."""

    def __init__(self, dependencies: TurnDependencies, running: RunningTurns, reader: TurnReader) -> None:
        self._dependencies = dependencies
        self._running = running
        self._reader = reader
        self.early = EarlyRefusal(dependencies.generator, dependencies.accounting, dependencies.pepper)

    async def launch(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        tool_hints: ToolHints = NO_HINTS,
    ) -> TurnHandle:
        """Starts a turn of the session with the given settings, and returns access to the running turn.

        `new_items` is the input of the turn. If the instructions or tools have changed since the last turn, encodes the
        whole history again. The start continues even if the caller is cancelled.
        Raises Conflict if the session was changed after the caller has read it. Can also raise InvalidRequest,
        ContextLengthExceeded, LimitExceeded, CapacityContended or Unavailable, and NotPermitted if the sender's key does
        not allow the session's model. After these errors, the session is unchanged.
        """
        principal.require_models([session.model.label])
        self.early.check_turn(principal, settings.service_tier)
        launching = self._launch(principal, session, new_items, settings, tool_hints)
        started = await self._running.launch(session.session_id, launching)
        return TurnHandle(principal.scope(), started[0].turn, self._reader, started)

    async def plan_output(self, principal: Principal, settings: SessionSettings) -> OutputPlan:
        """Returns the plan for answers with these settings: the grammar, and whether tool calls are parsed.

        Raises InvalidRequest if the settings ask for something wrong or unsupported.
        """
        planner = self._dependencies.planner.of(principal.tenant_id)
        return await planner.plan_off_loop(output_constraints(settings))

    async def count_tokens(
        self, principal: Principal, session: AgentSession | None, new_items: Sequence[Item], settings: SessionSettings
    ) -> int:
        """Returns the number of tokens in the prompt of a turn with these settings, without starting the turn.

        `session` is the session that the turn would continue; None is an empty one. Counts in the tenant's limits of
        requests. Raises LimitExceeded.
        """
        self._encoder()
        dependencies, transcript = self._dependencies, EMPTY_TRANSCRIPT
        if session is not None:
            transcript = await dependencies.store.transcript(principal.scope(), session, settings.opening)
        prompt = transcript.next_prompt(settings.opening, new_items)
        async with dependencies.accounting.counted(principal):
            num_new = await dependencies.encoding.count(principal.tenant_id, prompt)
        return len(transcript.token_ids) + num_new

    async def _launch(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        tool_hints: ToolHints,
    ) -> TurnTask:
        with self._dependencies.accounting.take_places(principal) as places:
            turn_id = TurnId(new_id("turn"))
            plan, expected_tokens = await self._plan(principal, session, new_items, settings, turn_id)
            started = await self._start(replace(plan, tool_hints=tool_hints), turn_id, expected_tokens)
            places.keep()
            principal.trace.hold()
            started[1].add_done_callback(lambda _: places.release())
            started[1].add_done_callback(lambda _: principal.trace.release())
        return started

    async def _start(self, plan: TurnPlan, turn_id: TurnId, expected_tokens: int) -> TurnTask:
        """Reserves quota for a turn, stores it and runs it."""
        accounting, principal = self._dependencies.accounting, plan.principal
        limits = await accounting.limits_of(principal)
        plan = replace(plan, request=replace(plan.request, kv_limits=kv_limits(limits, self._dependencies.pepper)))
        request = plan.request
        expected = Expected(
            expected_tokens,
            prompt_tokens=len(request.prompt_token_ids),
            max_output_tokens=request.sampling.max_tokens,
        )
        account = await accounting.open(_charge(plan), limits, expected)
        runner = None
        try:
            with self._running.starting(turn_id):
                runner = await self._begin(plan, turn_id, account)
                return self._running.start(runner, self._dependencies.generator.start(plan.request))
        finally:
            if runner is None:
                await account.settle(None, UsageOutcome.FAILED)

    async def _plan(
        self,
        principal: Principal,
        session: AgentSession,
        new_items: Sequence[Item],
        settings: SessionSettings,
        turn_id: TurnId,
    ) -> tuple[TurnPlan, int]:
        """Plans the request to the engine, and estimates its prompt and output tokens."""
        dependencies, encoder = self._dependencies, self._encoder()
        output = await self.plan_output(principal, settings)
        description = dependencies.generator.description
        encode = partial(dependencies.accounting.encode, principal, dependencies.encoding)
        prompt = await self._prompt(_Asked(principal, session, new_items, settings, turn_id), encode)
        budget = turn_budget(settings, len(prompt.token_ids), description.context_tokens)
        fields = read_sampling(settings.sampling)
        sampling = replace(fields.sampling_params(budget.max_tokens), logprobs=settings.num_logprobs)
        check_vocabulary(sampling, description.vocab_size)
        isolation = principal.isolation(dependencies.pepper)
        request = GenerationRequest(
            request_id=RequestId(turn_id) if principal.line is None else principal.line.request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            resolved=session.model,
            isolation=isolation,
            stop=tuple(fields.stop or ()),
            weight=principal.weight,
            tier=ServiceTier(principal.capped_tier(settings.service_tier)),
            parse_tool_calls=output.calls_tools,
            parallel_tool_calls=output.parallel_tool_calls,
            session=SessionUse(SessionKey(session.session_id), len(prompt.transcript.token_ids)),
            grammar=output.grammar,
            reasoning=ReasoningAsk(fields.thinking_token_budget),
            owner=RequestOwner(principal.tenant_id, session.model.adapter_label, session.session_id),
            due_at=principal.first_token_due_at,
            trace=principal.trace,
        )
        request = dependencies.generator.prepared(request)
        plan = TurnPlan(
            principal=principal,
            session=session,
            encoder=encoder,
            transcript=prompt.transcript,
            new_items=tuple(new_items),
            new_token_ids=prompt.new_token_ids,
            request=request,
            call_forms=call_forms(settings.tools),
            num_dropped=prompt.num_dropped,
        )
        return plan, len(prompt.token_ids) + budget.expected_tokens

    async def _prompt(self, asked: "_Asked", encode: Encode) -> "_TurnPrompt":
        """Encodes the prompt of a turn. If it does not fit and the settings say so, leaves out the oldest items.

        Raises ContextLengthExceeded if the prompt leaves no token for the answer.
        """
        settings, opening = asked.settings, asked.settings.opening
        transcript = await self._dependencies.store.transcript(asked.principal.scope(), asked.session, opening)
        try:
            prompt = _TurnPrompt(transcript, await encode(transcript.next_prompt(opening, asked.new_items)))
            turn_budget(settings, len(prompt.token_ids), self._dependencies.generator.description.context_tokens)
            return prompt
        except ContextLengthExceeded as error:
            shorter = await self._shorter_prompt(asked, encode) if settings.truncates_history else None
            if shorter is not None:
                return shorter
            if transcript.head is None:
                raise
            message = f"{error.message} Or rewind to an earlier checkpoint."
            raise ContextLengthExceeded(message, param=error.param, details=error.details) from None

    async def _shorter_prompt(self, asked: "_Asked", encode: Encode) -> "_TurnPrompt | None":
        """Encodes the prompt of a turn without the oldest items. Returns None if even the shortest one does not fit."""
        dependencies, settings = self._dependencies, asked.settings
        whole = await dependencies.store.whole_transcript(
            asked.principal.scope(), asked.session, truncated_opening(asked.turn_id)
        )
        context_tokens = dependencies.generator.description.context_tokens
        truncation = Truncation(encode, context_tokens, read_sampling(settings.sampling).token_limit)
        shorter = await truncation.shorten(
            (*whole.head_items, *asked.new_items),
            lambda items: replace(whole, head_items=()).next_prompt(settings.opening, items),
        )
        return None if shorter is None else _TurnPrompt(whole, shorter.token_ids, shorter.num_dropped)

    async def _begin(self, plan: TurnPlan, turn_id: TurnId, account: RequestAccount) -> TurnRunner:
        dependencies = self._dependencies
        made_with = _made_with(plan.request, plan.encoder, dependencies.generator.description)
        if plan.principal.end_user_id is not None:
            made_with = {**made_with, "end_user": plan.principal.end_user_id}
        if plan.principal.line is not None:
            made_with = {**made_with, "batch": plan.principal.line.batch_id}
        lease, turn = await dependencies.store.begin(plan.principal, plan.session, turn_id, plan.new_items, made_with)
        return TurnRunner(plan, lease, turn, account, dependencies)

    def _encoder(self) -> TurnEncoder:
        if self._dependencies.encoder is None:
            raise InvalidRequest("This model has no chat template: it serves no sessions.", code="no_chat_template")
        return self._dependencies.encoder


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn that a client asks for."""

    principal: Principal
    session: AgentSession
    new_items: Sequence[Item]
    settings: SessionSettings
    turn_id: TurnId


@dataclass(frozen=True, slots=True)
class _TurnPrompt:
    """The prompt of a turn: the history that it continues, and the token ids that it adds."""

    transcript: Transcript
    new_token_ids: tuple[int, ...]
    num_dropped: int = 0
    """How many of the oldest items are left out."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.transcript.token_ids, *self.new_token_ids)


def _charge(plan: TurnPlan) -> Charge:
    """Returns the fields of a turn's usage row that are known before the turn."""
    request, session, principal = plan.request, plan.session, plan.principal
    batch_id = None if principal.line is None else principal.line.batch_id
    return Charge(request.request_id, principal, session.model, session.charged_id, request.tier.value, batch_id)


def _made_with(request: GenerationRequest, encoder: TurnEncoder, description: EngineDescription) -> Mapping[str, Any]:
    """Returns the weights, template, tokenizer, sampling and service tier of one turn, with the seed that was drawn if none
    was given.
    """
    version = request.resolved.version
    return {
        "base": description.fingerprint,
        "adapter": None if version is None else version.digest,
        "template": encoder.template_digest,
        "tokenizer": encoder.tokenizer_digest,
        "sampling": {**asdict(request.sampling), "stop": list(request.stop)},
        "service_tier": request.tier.value,
    }


@dataclass(frozen=True, slots=True)
class ToolOutputsResult:
    """The stored outputs of a session's tool calls, and the turn that uses these outputs."""

    session: AgentSession
    outputs: tuple[ToolOutput, ...]
    """The stored outputs of the calls that the request names.

    `ToolOutputs.read` returns those of all calls at the end of the latest checkpoint.
    """
    missing: tuple[CallId, ...]
    """The ids of the tool calls that have no output yet."""
    turn: TurnHandle | None = None
    """The turn that uses the outputs, started by this request or earlier.

    It is None while outputs are missing, and after `read`.
    """


class ToolOutputs:
    """Stores the outputs of tool calls that clients send, and starts the turns that use them, for all tenants."""

    def __init__(
        self,
        loader: SessionLoader,
        store: SessionStore,
        launcher: TurnLauncher,
        reader: TurnReader,
        kv: SessionKvClient,
    ) -> None:
        self._loader = loader
        self._store = store
        self._launcher = launcher
        self._reader = reader
        self._kv = kv

    async def read(self, principal: Principal, session_id: str) -> ToolOutputsResult:
        """Reads the stored outputs of the tool calls at the end of a session's latest checkpoint.

        Raises NotFound if the session does not exist.
        """
        session = await self._loader.load(principal.scope(), session_id)
        stored = [ToolOutput(call.call_id, call.output) for call in session.ledger if call.output is not None]
        return ToolOutputsResult(session, tuple(stored), session.awaited_call_ids)

    async def send(
        self,
        principal: Principal,
        session_id: str,
        outputs: Sequence[Mapping[str, Any]],
        overrides: TurnOverrides = NO_OVERRIDES,
    ) -> ToolOutputsResult:
        """Stores outputs of tool calls. If then no output is missing, starts the session's next turn.

        Each of `outputs` has the fields `call_id` and `output`. `overrides` are for the next turn, if it starts now.
        Raises LimitExceeded, ContextLengthExceeded, CapacityContended or Unavailable if the next turn cannot start; the
        outputs stay stored. Can also raise ValidationFailed, NotFound or Conflict.
        """
        scope, given = principal.scope(), _tool_outputs(outputs)
        session = await self._loader.load(scope, session_id)
        accepted = await self._store.accept_outputs(scope, session.session_id, given)
        if accepted.may_continue:
            try:
                turn = await self._continue(principal, accepted.session, overrides)
                return ToolOutputsResult(accepted.session, accepted.outputs, (), turn)
            except Conflict:
                # Another request with the same outputs was faster, or the session was rewound. Read the session again.
                accepted = await self._store.accept_outputs(scope, session.session_id, given)
                if accepted.may_continue:
                    raise
        earlier = None if accepted.turn_id is None else await self._reader.find(scope, accepted.turn_id)
        if earlier is None:
            await self._prefetch(principal, accepted, given)
        return ToolOutputsResult(accepted.session, accepted.outputs, accepted.session.awaited_call_ids, earlier)

    async def _continue(self, principal: Principal, session: AgentSession, overrides: TurnOverrides) -> TurnHandle:
        """Starts a turn with the outputs of the session's last tool calls, in the order of the calls."""
        answers = [function_call_output(call.call_id, call.output or "") for call in session.ledger]
        return await self._launcher.launch(principal, session, answers, overrides.over(session.settings))

    async def _prefetch(self, principal: Principal, accepted: AcceptedOutputs, given: Sequence[ToolOutput]) -> None:
        """Loads the session's KV to the device while the tools without an output still run."""
        session = accepted.session
        if session.awaited_call_ids:
            names = {call.call_id: call.name for call in session.ledger}
            answered = [ToolWait(names[output.call_id]) for output in given if output.call_id in names]
            await self._kv.prefetch(await self._loader.history(principal.scope(), session), answered)


def _tool_outputs(outputs: Sequence[Mapping[str, Any]]) -> list[ToolOutput]:
    if not outputs:
        raise ValidationFailed("outputs must have at least one entry.", param="outputs")
    return [_tool_output(entry, f"outputs[{index}]") for index, entry in enumerate(outputs)]


def _tool_output(entry: Mapping[str, Any], param: str) -> ToolOutput:
    call_id = entry.get("call_id")
    if not isinstance(call_id, str):
        raise ValidationFailed(f"{param}.call_id must be a text.", param=f"{param}.call_id")
    if not may_be_id(call_id):
        raise NotFound("The session made no such call.", param=f"{param}.call_id", code="call_not_found")
    if "output" not in entry:
        raise ValidationFailed(f"{param}.output is missing.", param=f"{param}.output")
    return ToolOutput(CallId(call_id), parse_output(entry["output"], f"{param}.output"))
