"""Converts the events of a turn to the events of the Responses API.

    turn.created ──► response.in_progress
    reasoning ─────► output_item.added, reasoning_text.delta … .done, output_item.done
    text ──────────► output_item.added, content_part.added, output_text.delta … .done, content_part.done, item.done
    a call ────────► output_item.added, function_call_arguments.delta … .done, output_item.done
    a custom call ─► output_item.added, custom_tool_call_input.delta … .done, output_item.done
    the turn's end ► response.completed, .incomplete or .failed

Owns the sequence numbers, and the output so far. Reads only the turn's events, so a client that reads a response again
gets the same numbers.
Invariant: an item is closed before the next item is opened, and all items are closed before the last event.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from graftwork.platform.ids import CallId
from graftwork.sessions.core.events import EventType, SessionEvent
from graftwork.sessions.core.items import answer_call, answer_message_id
from graftwork.sessions.core.session import Turn
from graftwork.sessions.responses.record import ResponseRecord
from graftwork.sessions.responses.tools import response_call_forms
from graftwork.sessions.responses.views import IN_PROGRESS, QUEUED, final_status, response_body
from graftwork.sessions.tools.tool_choice import CallForm, CustomInputReader, input_of

Event = dict[str, Any]


class ResponseEvents:
    """Converts the events of one turn to events of the Responses API.

    Call `begin` first, then `read` for each event of the turn except the last, then `end`.
    """

    def __init__(self, record: ResponseRecord) -> None:
        self.output: list[dict[str, Any]] = []
        self._record = record
        self._next_number = 0
        self._is_open = False
        """Whether the last item of the output is not closed yet."""
        self._space = ""
        """The white space after a call. It is dropped unless text follows."""
        self._forms = response_call_forms(record.echo.get("tools") or ())
        self._custom_input: CustomInputReader | None = None
        """Reads the text of the open call, if it is one of a custom tool."""

    def begin(self) -> list[Event]:
        """Returns the first events of the response, which come before the events of the turn.

        These are `response.created` and, for a background response, `response.queued`.
        """
        if not self._record.is_background:
            return [self._lifecycle("response.created", IN_PROGRESS)]
        return [self._lifecycle("response.created", QUEUED), self._lifecycle("response.queued", QUEUED)]

    def read(self, event: SessionEvent) -> list[Event]:
        """Converts one event of the turn. Do not pass the last event of the turn: call `end` instead."""
        fields = event.fields
        match event.type:
            case EventType.TURN_CREATED:
                return [self._lifecycle("response.in_progress", IN_PROGRESS)]
            case EventType.REASONING_DELTA:
                return list(self._reason(fields["delta"]))
            case EventType.OUTPUT_TEXT_DELTA:
                return list(self._say(fields["delta"], fields.get("logprobs", ())))
            case EventType.TOOL_CALL_STARTED:
                return list(self._open_call(fields["call_id"], fields["name"]))
            case EventType.TOOL_CALL_ARGUMENTS_DELTA:
                return list(self._arguments_delta(fields["delta"]))
            case _:
                assert event.type is EventType.TOOL_CALL_DONE
                return list(self._end_call(fields["arguments"]))

    def end(self, turn: Turn) -> list[Event]:
        """Returns the last events of the response. Call this method after the end of the turn is stored.

        `turn` is the ended turn, as the caller has read it from the store.
        """
        status = final_status(turn)
        has_answer = any(item["type"] != "reasoning" for item in self.output)
        events = [] if has_answer or status not in ("completed", "incomplete") else list(self._open_message())
        events += self._close("completed" if status == "completed" else "incomplete")
        body = response_body(self._record, status, self.output, turn)
        name = "incomplete" if status == "cancelled" else status  # the API has no event for a cancelled response
        return [*events, self._event(f"response.{name}", response=body)]

    def _say(self, delta: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        if not self._speaks:
            delta = self._space + delta
            if self.output and not delta.strip():
                self._space = delta
                return
            yield from self._open_message()
        part = self.output[-1]["content"][0]
        part["text"] += delta
        if logprobs:
            part["logprobs"] = [*part.get("logprobs", ()), *logprobs]
        at = {**self._at(), "content_index": 0}
        yield self._event("response.output_text.delta", **at, delta=delta, logprobs=list(logprobs))

    def _reason(self, delta: str) -> Iterator[Event]:
        if not (self._is_open and self.output[-1]["type"] == "reasoning"):
            yield from self._close("completed")
            item_id = f"rs_{self._record.turn_id.partition('_')[2]}"
            yield self._open({"id": item_id, "type": "reasoning", "status": IN_PROGRESS, "summary": [], "content": []})
            self.output[-1]["content"] = [{"type": "reasoning_text", "text": ""}]
        self.output[-1]["content"][0]["text"] += delta
        yield self._event("response.reasoning_text.delta", **self._at(), content_index=0, delta=delta)

    @property
    def _speaks(self) -> bool:
        return self._is_open and self.output[-1]["type"] == "message"

    def _open_message(self) -> Iterator[Event]:
        """Opens a message. In the stored history, a second message after a call is part of the first message."""
        yield from self._close("completed")
        item_id: str = answer_message_id(self._record.turn_id)
        if any(item["id"] == item_id for item in self.output):
            item_id = f"{item_id}_{len(self.output)}"
        message: dict[str, Any] = {
            "id": item_id,
            "type": "message",
            "status": IN_PROGRESS,
            "role": "assistant",
            "content": [],
        }
        yield self._open(message)
        message["content"] = [{"type": "output_text", "text": "", "annotations": []}]
        yield self._event("response.content_part.added", **self._at(), content_index=0, part=self._part())

    def _open_call(self, call_id: CallId, name: str) -> Iterator[Event]:
        yield from self._close("completed")
        form = self._forms.get(name) or CallForm(name)
        call = answer_call(call_id, form, "").body
        self._custom_input = CustomInputReader() if form.is_custom else None
        yield self._open({**call, "status": IN_PROGRESS})

    def _arguments_delta(self, delta: str) -> Iterator[Event]:
        if self._custom_input is None:
            self.output[-1]["arguments"] += delta
            yield self._event("response.function_call_arguments.delta", **self._at(), delta=delta)
        elif text := self._custom_input.push(delta):
            self.output[-1]["input"] += text
            yield self._event("response.custom_tool_call_input.delta", **self._at(), delta=text)

    def _end_call(self, arguments: str) -> Iterator[Event]:
        """Ends a call.

        A call whose arguments are not a JSON object, for example because they were cut off, stays open until the turn's
        end.
        """
        call = self.output[-1]
        if self._custom_input is not None:
            call["input"] = input_of(arguments)
            yield self._event("response.custom_tool_call_input.done", **self._at(), input=call["input"])
        else:
            call["arguments"] = arguments
            done = {"arguments": arguments, "name": call["name"]}
            yield self._event("response.function_call_arguments.done", **self._at(), **done)
        if _is_object(arguments):
            yield from self._close("completed")

    def _open(self, item: dict[str, Any]) -> Event:
        self._space = ""
        self._is_open = True
        self.output.append(item)
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=deepcopy(item))

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "message":
            at, part = {**self._at(), "content_index": 0}, self._part()
            yield self._event("response.output_text.done", **at, text=part["text"], logprobs=part.get("logprobs", []))
            yield self._event("response.content_part.done", **at, part=part)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=deepcopy(item))

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = deepcopy(self.output[-1]["content"][0])
        return part

    def _lifecycle(self, name: str, status: str) -> Event:
        return self._event(name, response=response_body(self._record, status))

    def _event(self, name: str, /, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._next_number, **fields}
        self._next_number += 1
        return event


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), Mapping)
    except (ValueError, RecursionError):
        return False
