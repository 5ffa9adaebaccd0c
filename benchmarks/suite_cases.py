"""JSON schemas with instances that fit and instances that do not, and a byte-level way to ask a grammar about them."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.backends import Backends
from graftwork.engine.grammar.matching.matcher import Compiled
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.lint import GrammarEngine, LintedGrammar, lint
from graftwork.platform.errors import InvalidRequest

EOS = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), {"<|end|>": EOS}, (EOS,), "bytes")
"""One token a byte, so that a token is never more than a grammar can be asked about."""


class Verdict(StrEnum):
    CORRECT = "correct"
    REFUSED = "refused"
    UNDER = "under"
    """A document that fits is not accepted."""
    OVER = "over"
    """A document that does not fit is accepted."""


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """One schema and its instances."""

    name: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


def data_folder() -> Path | None:
    """Where the suites are; None where they are not."""
    root = Path(__file__).parent.parent
    folder = Path(os.environ.get("GRAFTWORK_TEST_DATA", root.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def suite_cases(folder: Path, part: str = "") -> Iterator[SchemaCase]:
    """The JSON-Schema-Test-Suite of draft 2020-12; `part` may be `optional` or `optional/format`."""
    for path in sorted((folder / "json-schema-test-suite" / "draft2020-12" / part).glob("*.json")):
        for group in json.loads(path.read_text()):
            instances = tuple((test["data"], test["valid"]) for test in group["tests"])
            yield SchemaCase(f"{path.stem}: {group['description']}", group["schema"], instances)


def bench_cases(folder: Path) -> Iterator[SchemaCase]:
    """The sample of JSONSchemaBench."""
    for line in (folder / "jsonschemabench-sample.jsonl").read_text().splitlines():
        case = json.loads(line)
        instances = tuple((test["data"], test["valid"]) for test in case["tests"])
        yield SchemaCase(case["name"], case["schema"], instances)


def accepts(compiled: Compiled, value: Any) -> bool:
    """Whether a grammar over bytes accepts a value as Python writes it."""
    matcher = compiled.matcher()
    text = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return all(matcher.accept(byte) for byte in text) and matcher.is_complete()


class Judge:
    """Compiles schemas over bytes, ours or by one engine alone, and compares what they accept with what fits."""

    def __init__(self) -> None:
        self._backends = Backends(BYTES)

    def ours(self, schema: Any, *, strict: bool = True) -> Compiled:
        """Raises InvalidRequest for what is refused."""
        linted = lint(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), strict))
        return self.compiled(linted)

    def alone(self, engine: GrammarEngine, schema: Any) -> Compiled:
        """An engine as it comes, without our reading before it. Raises InvalidRequest for what it refuses."""
        return self.compiled(LintedGrammar(engine, GrammarKind.JSON_SCHEMA, json.dumps(schema)))

    def compiled(self, linted: LintedGrammar, *, compact: bool = False) -> Compiled:
        backend = self._backends.of(linted.engine)
        try:
            return backend.load(backend.compile(linted, compact=compact))
        except ValueError as error:
            raise InvalidRequest(str(error), param="#") from None

    def verdicts(self, case: SchemaCase, engine: GrammarEngine | None = None) -> list[Verdict]:
        """One for each instance; `engine` alone, or ours."""
        try:
            compiled = self.ours(case.schema) if engine is None else self.alone(engine, case.schema)
        except InvalidRequest:
            return [Verdict.REFUSED] * len(case.instances)
        return [_verdict(accepts(compiled, value), fits) for value, fits in case.instances]


def _verdict(accepted: bool, fits: bool) -> Verdict:
    if accepted == fits:
        return Verdict.CORRECT
    return Verdict.OVER if accepted else Verdict.UNDER
