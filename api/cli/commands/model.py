"""Defines `graftwork model`, which examines a model's folder before it is served."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from graftwork.api.cli.console.flags import Device
from graftwork.api.cli.console.output import JsonFlag, show_facts, show_json, show_table, size
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from graftwork.engine.core.config import EngineConfig
    from graftwork.engine.core.sampling import RollingWindow
    from graftwork.engine.evaluation.comparison import Divergence, TextFigures
    from graftwork.engine.evaluation.gate import Verdict
    from graftwork.engine.evaluation.text_scorer import TextScorer

app = typer.Typer(no_args_is_help=True, help="Examine a model's folder before it is served.")

_TEXT_TOKENS = 512
"""The most tokens of one piece of the texts."""
_WINDOWS_OF_PIECE = 4
"""With a rolling window, a piece has so many times the tokens that are in sight."""


@app.callback()
def group() -> None:
    """Makes `check` a command of its own, although it is the only one."""


@app.command()
def check(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The model to examine: a Hugging Face folder.")],
    texts: Annotated[
        Path, typer.Option(metavar="FILE", help="A UTF-8 text, or a folder of .txt files, like your own use.")
    ],
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Its parent: the model that was quantised or converted.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the texts are read, at most.")] = 4096,
    dtype: Annotated[str, typer.Option(help="The dtype of the model: auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="Round the model's weights to int8 or int4, as `serve --quantization` does.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="How the model's KV is stored: auto, int8 or fp8.")] = "auto",
    window: Annotated[
        int | None, typer.Option(min=1, help="Its tokens attend to the last N tokens only, and to the sinks.")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(min=0, help="With --window: the first tokens that stay in sight (default: 4).")
    ] = None,
    kv_budget: Annotated[
        int | None,
        typer.Option(min=1, help="It answers from so many tokens of each prompt: the last quarter of a text."),
    ] = None,
    against_dtype: Annotated[str, typer.Option(help="The dtype of its parent.")] = "auto",
    device: Device = None,
    max_kl: Annotated[float, typer.Option(min=0.0, help="The most KL divergence, in nats a token.")] = 0.05,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The least share of equal greedy tokens.")
    ] = 0.95,
    max_perplexity_ratio: Annotated[float, typer.Option(min=1.0, help="The most perplexity by the parent's.")] = 1.03,
    as_json: JsonFlag = False,
) -> None:
    """Measure how well a model predicts texts, how far it is from its parent, and what memory it needs.

    Both run as they would be served. The exit status is 1 if a figure is beyond its limit.

    Example: graftwork model check ./support-int8 --against ./support --texts ./transcripts
    """
    from graftwork.engine.core.config import EngineConfig
    from graftwork.engine.evaluation.gate import Limits, judge

    forgets, where = Forgetting(*_sampled(window, sinks, kv_budget)), device or "auto"
    pieces = _pieces(model, against, texts, tokens, forgets)
    candidate = EngineConfig(
        model=model, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype, device=where, host_kv_bytes=0
    )
    origin = None
    if against is not None:
        origin = EngineConfig(model=against, dtype=against_dtype, device=where, host_kv_bytes=0)
    figures, parent, divergence, memory = _measure(candidate, forgets, origin, pieces, quiet=as_json)
    verdict = None
    if parent is not None and divergence is not None:
        verdict = judge(figures, parent, divergence, Limits(max_kl, min_agreement, max_perplexity_ratio))
    if as_json:
        show_json(_body(figures, parent, divergence, verdict, memory))
    else:
        _show(model, figures, parent, divergence, verdict, memory)
    if verdict is not None and not verdict.passes:
        raise typer.Exit(1)


class _Measured(NamedTuple):
    """The figures of a model, those of its parent, how far the two are apart, and the model's memory in bytes."""

    figures: "TextFigures"
    parent: "TextFigures | None"
    divergence: "Divergence | None"
    memory: dict[str, int]


class Forgetting(NamedTuple):
    """What the model does not attend to."""

    window: "RollingWindow | None"
    kv_budget: int | None

    @property
    def seen(self) -> int:
        """The tokens that stay in sight; 0 if all do."""
        if self.kv_budget is not None:
            return self.kv_budget
        return 0 if self.window is None else self.window.sinks + self.window.window

    def starts(self, pieces: "Sequence[Sequence[int]]") -> list[int]:
        """Returns the first position of each piece at which something may be forgotten that is measured."""
        from graftwork.engine.evaluation.forced_decoding import prompt_tokens

        return [0 if self.kv_budget is None else prompt_tokens(len(piece)) for piece in pieces]


_FORGETS_NOTHING = Forgetting(None, None)


def _sampled(window: int | None, sinks: int | None, kv_budget: int | None) -> "tuple[RollingWindow | None, int | None]":
    """Returns the options as a request would have them. Raises InvalidRequest for what no request may have."""
    from graftwork.engine.core.sampling import SamplingParams

    sampling = SamplingParams(max_tokens=1, attention_window=window, attention_sinks=sinks, kv_budget=kv_budget)
    sampling.check()
    return sampling.rolling_window, kv_budget


def _measure(
    candidate: "EngineConfig",
    forgets: Forgetting,
    parent: "EngineConfig | None",
    pieces: Sequence[tuple[int, ...]],
    *,
    quiet: bool,
) -> _Measured:
    """Runs a model over texts, and its parent before, if there is one. The parent attends to all tokens."""
    from graftwork.engine.evaluation.comparison import DivergenceMeter, LikelihoodMeter, ParentRows, RowsFrom

    own, starts = LikelihoodMeter(pieces), forgets.starts(pieces)
    theirs, meter = LikelihoodMeter(pieces), None
    with tempfile.TemporaryDirectory(prefix="graftwork-model-check-") as folder:
        if parent is not None:
            with _loaded(parent) as scorer:
                rows = ParentRows(Path(folder) / "rows", theirs.num_rows, scorer.vocab_size)
                counted = RowsFrom(pieces, starts, theirs.take) if any(starts) else theirs
                _score(scorer, pieces, "parent", (counted.take, rows.put), quiet=quiet)
            meter = DivergenceMeter(rows)
        with _loaded(candidate, forgets) as scorer:
            takes = [own.take] if meter is None else [own.take, meter.take]
            takes = [RowsFrom(pieces, starts, take).take for take in takes] if any(starts) else takes
            _score(scorer, pieces, "model", takes, quiet=quiet)
            memory = {"weights_bytes": scorer.weights_bytes, "kv_token_bytes": scorer.kv_token_bytes}
    if meter is None:
        return _Measured(own.figures(), None, None, memory)
    return _Measured(own.figures(), theirs.figures(), meter.figures(), memory)


def _pieces(model: Path, against: Path | None, texts: Path, most: int, forgets: Forgetting) -> list[tuple[int, ...]]:
    """Returns the texts as pieces of token ids, each long enough for a window or a budget. Raises InvalidRequest if there is
    nothing to compare.
    """
    from graftwork.sessions.text.model_files import ModelFolder

    folder = ModelFolder.load(model)
    if against is not None and ModelFolder.load(against).tokenizer.digest != folder.tokenizer.digest:
        raise InvalidRequest(
            f"{model} and {against} have different tokenizers, so their tokens cannot be compared: take the folder that "
            "the model was made from.",
            param="against",
        )
    files = sorted(texts.glob("*.txt")) if texts.is_dir() else [texts]
    pieces: list[tuple[int, ...]] = []
    seen = forgets.seen
    length = min(max(_TEXT_TOKENS, _WINDOWS_OF_PIECE * seen), folder.context_tokens - 1)
    for file in files:
        try:
            token_ids = folder.tokenizer.encode(file.read_text(encoding="utf-8"), allow_special=False)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"--texts: {error}. Give a UTF-8 file, or a folder of .txt files.", param="texts"
            ) from error
        for start in range(0, len(token_ids), length):
            left = most - sum(map(len, pieces))
            pieces += [piece] if len(piece := token_ids[start : start + min(length, left)]) > 1 else []
    if not pieces:
        raise InvalidRequest(f"--texts: {texts} has no text of two tokens: give what your users write.", param="texts")
    if forgets.kv_budget is not None:
        pieces = _decoded(pieces, forgets.kv_budget)
    elif seen and max(map(len, pieces)) <= seen:
        raise InvalidRequest(
            f"--window: the longest text has {max(map(len, pieces))} tokens, and sinks and window reach over {seen}, so "
            "nothing would be out of sight: give longer texts, more --tokens, or a smaller window.",
            param="window",
        )
    return pieces


def _decoded(pieces: list[tuple[int, ...]], kv_budget: int) -> list[tuple[int, ...]]:
    """Returns the pieces whose prompts are at least twice the budget. Raises InvalidRequest if there are none."""
    from graftwork.engine.evaluation.forced_decoding import prompt_tokens

    long = [piece for piece in pieces if prompt_tokens(len(piece)) >= 2 * kv_budget]
    if not long:
        raise InvalidRequest(
            f"--kv-budget: the longest text has {max(map(len, pieces))} tokens, and three quarters of it must be twice the "
            f"budget of {kv_budget}: give longer texts, more --tokens, or a smaller budget.",
            param="kv_budget",
        )
    return long


@contextmanager
def _loaded(config: "EngineConfig", forgets: Forgetting = _FORGETS_NOTHING) -> "Iterator[TextScorer]":
    from graftwork.engine.evaluation.text_scorer import TextScorer

    with closing(TextScorer(config, forgets.window, forgets.kv_budget)) as scorer:
        yield scorer


def _score(
    scorer: "TextScorer", pieces: Sequence[Sequence[int]], name: str, takes: Sequence[Any], *, quiet: bool
) -> None:
    """Runs a model over all texts, with a progress bar at a terminal."""

    def take(first: int, rows: Any) -> None:
        for each in takes:
            each(first, rows)

    if quiet:
        scorer.score(pieces, take)
        return
    with typer.progressbar(length=sum(map(len, pieces)), label=f"scoring the {name}", file=sys.stderr) as bar:
        scorer.score(pieces, take, bar.update)


def _body(
    figures: "TextFigures",
    parent: "TextFigures | None",
    divergence: "Divergence | None",
    verdict: "Verdict | None",
    memory: dict[str, int],
) -> dict[str, Any]:
    return {
        "model": asdict(figures),
        "parent": None if parent is None else asdict(parent),
        "divergence": None if divergence is None else asdict(divergence),
        "memory": memory,
        "passes": None if verdict is None else verdict.passes,
        "limits": [] if verdict is None else [asdict(one) for one in verdict.judgements],
    }


def _show(
    model: Path,
    figures: "TextFigures",
    parent: "TextFigures | None",
    divergence: "Divergence | None",
    verdict: "Verdict | None",
    memory: dict[str, int],
) -> None:
    facts: list[tuple[str, object]] = [
        ("model", model),
        ("tokens predicted", figures.num_tokens),
        (
            "perplexity",
            f"{figures.perplexity:,.3f}" + ("" if parent is None else f", its parent's {parent.perplexity:,.3f}"),
        ),
        ("weights", size(memory["weights_bytes"])),
        ("KV of 1,000 tokens", size(1000 * memory["kv_token_bytes"])),
    ]
    if divergence is not None:
        facts.append(("KL at 99 of 100 tokens", f"at most {divergence.worst_kl:.4f} nats"))
    show_facts(facts)
    if verdict is None:
        typer.echo("\nNo verdict: give --against DIR to compare it with its parent.")
        return
    typer.echo()
    rows = [
        (one.name, f"{one.value:.4f}", f"{one.limit:.4f}", "yes" if one.holds else "NO") for one in verdict.judgements
    ]
    show_table(["figure", "value", "limit", "holds"], rows, empty="")
    typer.echo(
        "\nIt may take its parent's place." if verdict.passes else "\nIt is too far from its parent: do not deploy it."
    )
