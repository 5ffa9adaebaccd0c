"""Tests of tags, search, defaults and provenance on both databases."""

from typing import Any

import pytest

from graftwork.adapters.format.defaults import NO_DEFAULTS, AdapterDefaults
from graftwork.adapters.format.specs import Provenance
from graftwork.adapters.inspection.upload import Push
from graftwork.adapters.registry.details import MAX_TAGS, AdapterChange
from graftwork.adapters.registry.repository import AdapterFilter
from graftwork.platform.errors import NotFound, ValidationFailed
from graftwork.platform.pagination import Order, PageRequest
from tests.adapters.adapter_files import DESCRIPTION
from tests.adapters.registry.two_tenants import SOMEONE, TwoTenants

DEFAULTS = AdapterDefaults("Be kind.", {"temperature": 0.5}, {"type": "json_object"}, ({"type": "function"},))


async def names(two_tenants: TwoTenants, **wanted: Any) -> list[str]:
    """The names of all adapters that fit a filter, read in pages of one."""
    found: list[str] = []
    after: str | None = None
    while True:
        request = PageRequest(limit=1, after=after, order=Order.ASCENDING)
        page = await two_tenants.registry.list(two_tenants.a, request, AdapterFilter(**wanted))
        found += [adapter.name for adapter in page.items]
        if not page.has_more:
            return found
        after = page.items[-1].id


async def test_lists_are_narrowed_by_tag_name_base_and_state(with_grace: TwoTenants) -> None:
    """A list has the adapters with all the tags, the text in the name, the base and the state, page by page."""
    tags = {"support-de": ("lang:de", "team"), "support_en": ("lang:en", "team"), "pirate": (), "gone": ("team",)}
    for seed, (name, own) in enumerate(tags.items()):
        await with_grace.publish(name, seed=seed)
        await with_grace.registry.details.change(with_grace.a, name, AdapterChange(tags=own))
    await with_grace.publish("support-b", seed=4, scope=with_grace.b)
    await with_grace.registry.details.change(with_grace.b, "support-b", AdapterChange(tags=("team",)))
    await with_grace.registry.deletions.delete(with_grace.a, "gone")

    assert await names(with_grace) == ["support-de", "support_en", "pirate"]
    assert await names(with_grace, tags=("team",)) == ["support-de", "support_en"]
    assert await names(with_grace, tags=("team", "lang:de")) == ["support-de"]
    assert await names(with_grace, tags=("none",)) == []
    assert await names(with_grace, name="support") == ["support-de", "support_en"]
    assert await names(with_grace, name="t_e") == ["support_en"]  # "_" is no wildcard
    assert await names(with_grace, base=DESCRIPTION.fingerprint) == ["support-de", "support_en", "pirate"]
    assert await names(with_grace, base="sha256:other") == []
    assert await names(with_grace, is_deleted=True) == ["gone"]
    assert await names(with_grace, is_deleted=True, tags=("team",)) == ["gone"]


async def test_tags_and_defaults_replace_what_was_there(two_tenants: TwoTenants) -> None:
    """New tags and defaults replace the old ones, each alone; empty ones remove them, and a request finds them."""
    registry, a = two_tenants.registry, two_tenants.a
    await two_tenants.publish()
    await registry.details.change(a, "bot", AdapterChange(("b", "a", "b"), DEFAULTS))
    tagged = await registry.details.change(a, "bot", AdapterChange(tags=("c",)))
    resolved = await registry.resolve(a, "bot", "tiny", SOMEONE)
    bare = await registry.details.change(a, "bot", AdapterChange((), NO_DEFAULTS))

    assert (tagged.tags, tagged.defaults) == (("c",), DEFAULTS)
    assert resolved.defaults == DEFAULTS
    assert (bare.tags, bare.defaults) == ((), NO_DEFAULTS)
    assert (await registry.resolve(a, "bot", "tiny", SOMEONE)).defaults == NO_DEFAULTS


async def test_the_audit_log_names_what_has_changed_without_its_text(two_tenants: TwoTenants) -> None:
    """The audit log has the tags and which defaults there are, and no word of the system prompt."""
    await two_tenants.publish()
    await two_tenants.registry.details.change(two_tenants.a, "bot", AdapterChange(("x",), DEFAULTS), actor="key_1")

    actor, action, target, details = (await two_tenants.audited())[-1]

    assert (actor, action, target) == ("key_1", "adapter.changed", "bot")
    assert details == {"tags": ["x"], "defaults": ["response_format", "sampling", "system", "tools"]}


@pytest.mark.parametrize(
    "tags", [("",), ("A",), ("a b",), ("-a",), ("a" * 64,), ("\0",), tuple(f"t{i}" for i in range(MAX_TAGS + 1))]
)
async def test_wrong_tags_are_refused(two_tenants: TwoTenants, tags: tuple[str, ...]) -> None:
    """A tag of a wrong form, or too many tags, change nothing."""
    await two_tenants.publish()

    with pytest.raises(ValidationFailed) as caught:
        await two_tenants.registry.details.change(two_tenants.a, "bot", AdapterChange(tags=tags))

    assert caught.value.param == "tags"
    assert (await two_tenants.registry.get(two_tenants.a, "bot")).tags == ()


async def test_anothers_adapter_cannot_be_changed(two_tenants: TwoTenants) -> None:
    """Another tenant's adapter is not found."""
    await two_tenants.publish()

    with pytest.raises(NotFound):
        await two_tenants.registry.details.change(two_tenants.b, "bot", AdapterChange(tags=("x",)))


async def test_a_version_knows_where_it_comes_from(two_tenants: TwoTenants) -> None:
    """A version keeps who pushed it, its run, its parent and its data; a parent must be a version of the tenant."""
    digest = "sha256:" + "d" * 64
    await two_tenants.publish(seed=0, push=Push(actor="key_1"))
    origin = Provenance(None, "run-42", "bot@1", digest)
    await two_tenants.publish(seed=1, push=Push(actor="key_2", provenance=origin))

    first, second = (await two_tenants.registry.get(two_tenants.a, "bot")).versions

    assert first.provenance == Provenance(pushed_by="key_1")
    assert second.provenance == Provenance("key_2", "run-42", "bot@1", digest)
    for parent in ("bot@9", "bot", "bot@prod", "none@1", "../x", ""):
        with pytest.raises(ValidationFailed) as caught:
            await two_tenants.publish(seed=2, push=Push(provenance=Provenance(parent=parent)))
        assert caught.value.param == "parent"
    with pytest.raises(ValidationFailed):
        await two_tenants.publish(seed=3, scope=two_tenants.b, push=Push(provenance=Provenance(parent="bot@1")))
