"""What is copied down in the background, and when."""

from graftwork.engine.transfers import TransferKind
from tests.engine.kv_lab import KvLab


def test_pages_of_a_running_sequence_wait_for_its_end() -> None:
    """Free pages run short and nothing is idle: nothing is copied, since no session reaches those pages yet and the
    host would give them up before all others. Once the sequence has let go of them, they are copied."""
    lab = KvLab(device=4, host=8)
    path = lab.path("x", (1, 2, 3, 4, 5, 6, 7, 8))
    residence = lab.memory.settle(path, lab.memory.match(path), 8)
    assert residence is not None
    lab.compute(path, residence)
    lab.memory.enter(path, residence.pages, None)

    lab.memory.tick()
    while_running = len(lab.copies.under_way)
    lab.memory.release(residence.pages)
    lab.memory.tick()
    lab.fire_all()

    assert while_running == 0
    assert lab.copies.moved[TransferKind.SAVE] == 4
    lab.check()
