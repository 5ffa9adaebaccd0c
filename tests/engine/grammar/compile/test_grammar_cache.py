"""Tests of the cache of compiled grammars: its bounds, and the folder of public grammars."""

from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.engine.grammar.compile.grammar_cache import GrammarCache, GrammarKey, PublicGrammars
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.errors import InvalidRequest


def keep_refusals(cache: GrammarCache, domain: str | None, names: range) -> list[GrammarKey]:
    """Adds a refusal under each name, and returns the keys."""
    keys = [GrammarKey(domain, str(name)) for name in names]
    for key in keys:
        cache.keep(key, InvalidRequest("no"))
        cache.check_integrity()
    return keys


def test_a_domain_evicts_its_own_grammars_first() -> None:
    """Above its own bound a domain loses its oldest results; above the bound of all, the fullest domain does."""
    cache = GrammarCache(replace(CompileLimits(), cache_entries=10, domain_cache_entries=6))
    public = keep_refusals(cache, None, range(6))
    light = keep_refusals(cache, "light", range(3))
    calm = keep_refusals(cache, "calm", range(2))

    flood = keep_refusals(cache, "flood", range(20))

    kept = set(cache)
    assert kept.issuperset([*public, *light, *calm])
    assert kept.intersection(flood) == set(flood[-5:])


def test_a_folder_of_public_grammars_is_read_or_refused_by_name(tmp_path: Path) -> None:
    """A file without JSON is refused by its name, and so is a folder that does not exist."""
    (tmp_path / "bad.json").write_text("{")

    for folder, named in ((tmp_path, "bad.json"), (tmp_path / "none", "none")):
        with pytest.raises(InvalidRequest, match=named):
            PublicGrammars.read(folder)
