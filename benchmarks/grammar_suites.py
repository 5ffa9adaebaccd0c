"""What grammars accept of the public suites of JSON Schema: ours, and each engine alone.

    python benchmarks/grammar_suites.py [--json OUT]

Over bytes, one token each, so that the model and its tokenizer play no part. An engine alone is asked as it comes
(xgrammar with its own strict mode off, which is what JSON Schema means, and with bounded whitespace). Under ours, an instance that does not fit is
never accepted; the price is that some schemas are refused, and some ways of writing a value are not offered: another
order of keys, whole numbers with a point.
"""

import argparse
import json
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from machine import describe_machine
from rich.console import Console
from rich.table import Table
from suite_cases import Judge, SchemaCase, Verdict, bench_cases, data_folder, suite_cases

from graftwork.engine.grammar.schema.lint import GrammarEngine

ENGINES: dict[str, GrammarEngine | None] = {
    "ours": None,
    "xgrammar alone": GrammarEngine.XGRAMMAR,
    "llguidance alone": GrammarEngine.LLGUIDANCE,
}

WHOLE_BENCH = "JSONSchemaBench sample"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    folder = data_folder()
    if folder is None:
        Console().print("The suites are not here: set GRAFTWORK_TEST_DATA to their folder.")
        return 1
    suites = {
        "JSON-Schema-Test-Suite": list(suite_cases(folder)),
        "… optional": list(suite_cases(folder, "optional")),
        "… optional formats": list(suite_cases(folder, "optional/format")),
        "JSONSchemaBench, every 6th": list(bench_cases(folder))[::6],
        WHOLE_BENCH: list(bench_cases(folder)),
    }
    judge = Judge()
    table = Table("suite", "engine", *(verdict.value for verdict in Verdict), "seconds")
    rows = []
    for suite, cases in suites.items():
        for name, engine in ENGINES.items():
            if suite == WHOLE_BENCH and engine is not None:
                continue  # xgrammar alone takes many minutes over it
            counts, seconds = count(judge, cases, engine)
            rows.append({"suite": suite, "engine": name, "seconds": round(seconds, 1), **counts})
            table.add_row(suite, name, *(str(counts[verdict.value]) for verdict in Verdict), f"{seconds:.1f}")
    Console().print(table)
    if options.json is not None:
        versions = {name: version(name) for name in ("xgrammar", "llguidance", "jsonschema")}
        record = {
            "date": datetime.now(UTC).isoformat(),
            "machine": describe_machine(),
            "versions": versions,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def count(judge: Judge, cases: list[SchemaCase], engine: GrammarEngine | None) -> tuple[dict[str, int], float]:
    started = time.monotonic()
    counts = Counter(verdict.value for case in cases for verdict in judge.verdicts(case, engine))
    return {verdict.value: counts[verdict.value] for verdict in Verdict}, time.monotonic() - started


if __name__ == "__main__":
    raise SystemExit(main())
