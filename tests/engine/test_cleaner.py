"""What becomes of pages that are copied down while their sequence runs."""

from graftwork.engine.request import SessionKey, SessionUse
from graftwork.engine.tier_names import Tier
from tests.engine.kv_lab import KvLab


def test_the_host_keeps_what_a_running_sequence_has_just_made() -> None:
    """No session's history runs through its pages yet, but nobody has left them: older pages that are also on disk
    make room. The end of the turn would have to copy them again."""
    lab = KvLab(device=8, host=6)
    use = SessionUse(SessionKey("running"))
    lab.run("x", (1, 2, 3, 4), "old")
    old = lab.memory.residency.tree.nodes_on(Tier.DEVICE)
    lab.memory.cleaner.save(old)
    lab.fire_all()
    path = lab.path("x", (5, 6, 7, 8, 9, 1, 2, 3))
    residence = lab.memory.settle(path, lab.memory.match(path), 8, use)
    assert residence is not None
    lab.compute(path, residence)
    made = lab.memory.enter(path, residence.pages, use)
    lab.memory.cleaner.save(made)
    lab.fire_all()

    lab.run("x", (3, 3, 3, 3), "next")
    lab.memory.cleaner.save(lab.memory.residency.tree.nodes_on(Tier.DEVICE))
    lab.fire_all()

    assert [node.host is not None for node in made] == [True] * 4
    assert [node.host is not None for node in old] == [False] * 2
    lab.check(num_held=4)
