"""Draws a request's timeline in the terminal: a bar for each stage and each span of the engine, with milliseconds."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graftwork.platform.answers.timelines import EngineSpan, GenerationTimeline, Timeline

_LEAST_BAR = 16
_NAMES_WIDTH = 60
"""So many columns for all but the bar."""
_COLOURS = {
    "queue": "yellow",
    "adapter_load": "magenta",
    "grammar_compile": "magenta",
    "kv_load": "magenta",
    "prefill": "cyan",
    "decode": "green",
    "preempted": "red",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the chart."""

    name: str
    start_ms: float
    duration_ms: float
    figures: str = ""


def show_timeline(timeline: Timeline) -> None:
    """Prints the timeline. In a pipe it has no colours and is 100 columns wide."""
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else 100, highlight=False)
    for line in _head(timeline):
        console.print(Text(line), soft_wrap=True)
    width = max(console.width - _NAMES_WIDTH, _LEAST_BAR)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=width)
    table.add_column(overflow="fold")
    for bar in bars(timeline):
        colour = _COLOURS.get(bar.name.strip(), "blue")
        drawn = Text(draw(bar, timeline.total_ms, width), style=colour)
        table.add_row(Text(bar.name), f"{bar.duration_ms:.1f} ms", drawn, Text(bar.figures))
    console.print(table)
    if not timeline.traced:
        console.print("The engine's steps are not here: send the request with the header x-graftwork-trace: 1.")


def bars(timeline: Timeline) -> Iterator[Bar]:
    """Yields the lines of the chart: the gateway's stages, then the spans of each answer."""
    for stage in timeline.stages:
        yield Bar(stage.name, stage.start_ms, stage.duration_ms)
    for generation in timeline.generations:
        for number, run in enumerate(generation.engines, start=1):
            end_ms = max((span.start_ms + span.duration_ms for span in run.spans), default=run.start_ms)
            name = "engine" if len(generation.engines) == 1 else f"engine, run {number}"
            yield Bar(name, run.start_ms, end_ms - run.start_ms, _of_generation(timeline, generation))
            yield from (
                Bar(("    " if span.inside else "  ") + span.name, span.start_ms, span.duration_ms, _figures(span))
                for span in sorted(run.spans, key=lambda span: (span.start_ms, span.inside is not None))
            )


def draw(bar: Bar, total_ms: float, width: int) -> str:
    """Returns a bar of at most `width` characters, in eighths of a character. What has a length is never invisible."""
    scale = width * 8 / total_ms if total_ms > 0 else 0.0
    start = min(round(bar.start_ms * scale), width * 8 - 1)
    length = max(min(round((bar.start_ms + bar.duration_ms) * scale), width * 8) - start, 1 if bar.duration_ms else 0)
    blank, inside = divmod(start, 8)
    first = min(length, 8 - inside) if inside else 0
    whole, rest = divmod(length - first, 8)
    head = (_EIGHTHS[first] if first < 8 - inside else "▐") if inside and length else ""
    return (" " * blank + head + "█" * whole + (_EIGHTHS[rest] if rest else ""))[:width]


def _head(timeline: Timeline) -> Iterator[str]:
    ids = f"{timeline.id}  trace {timeline.trace_id}"
    yield ids if timeline.client_request_id is None else f"{ids}  {timeline.client_request_id!r}"
    answered = "–" if timeline.http_status is None else timeline.http_status
    yield f"{timeline.method} {timeline.path}  {timeline.status} ({answered})  {timeline.total_ms:.1f} ms"
    yield f"{_plain(timeline.adapter or timeline.model or '–')}  tenant {timeline.tenant_id}  key {timeline.key_id}"
    for generation in timeline.generations:
        if (prompt := generation.prompt) is not None:
            tiers = ", ".join(
                f"{getattr(prompt, tier)} {tier}"
                for tier in ("device", "host", "disk", "recomputed")
                if getattr(prompt, tier)
            )
            missed = f" ({prompt.miss_reason})" if prompt.miss_reason else ""
            yield f"prompt: {tiers or 'empty'}{missed}; {generation.completion_tokens} tokens generated"
    if timeline.writes:
        yield f"network: {timeline.writes} writes took {timeline.write_ms:.1f} ms"


def _plain(text: str) -> str:
    """Returns a name without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _of_generation(timeline: Timeline, generation: GenerationTimeline) -> str:
    name = generation.id if len(timeline.generations) > 1 else ""
    if generation.detokenise_calls:
        name += f" detokenise {generation.detokenise_ms:.1f} ms"
    return name.strip()


def _figures(span: EngineSpan) -> str:
    parts = [
        f"{span.steps} steps" if span.steps and span.steps > 1 else "",
        f"{span.tokens} tokens" if span.tokens else "",
        f"batch {span.batch_requests:g}" if span.batch_requests else "",
        f"drafts {span.accepted or 0}/{span.drafted}" if span.drafted else "",
        f"drafting {span.draft_ms:.1f} ms" if span.draft_ms else "",
        f"{span.masks} masks {span.mask_ms or 0:.1f} ms" if span.masks else "",
    ]
    return ", ".join(part for part in parts if part)
