"""Which file holds which page, whose bytes they are, and in which order files would be missed.

DiskIndex alone counts the bytes of the disk tier. A file is claimed (its bytes are counted, nothing finds it), then
published (its pages are found, and it may be chosen to make room), then retired (nothing finds it any more, but its
bytes stay counted until the file is gone), and last discharged. So what is counted is never less than what lies there.

It never touches a file. Each method is one step under one lock that is held for no input or output, so that the
engine's loop may ask while a worker writes; `holds` takes no lock at all.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.eviction import OwnerAccounts, VictimChoice
from graftwork.engine.kv.disk.file_format import PageRun, Stretch


class DiskIndex:
    """The pages, files and bytes of one folder, within `max_bytes`."""

    def __init__(self, max_bytes: int, shared_reserve_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._places: dict[PageKey, tuple[PageRun, int]] = {}
        self._queues: dict[bytes | None, OrderedDict[str, PageRun]] = {}
        self._accounts = OwnerAccounts(shared_reserve_bytes)
        self._unlisted: dict[str, PageRun] = {}
        """Claimed or retired: counted, and not to be found."""
        self._emptied: dict[str, PageRun] = {}
        """Published, and without a page that is found here."""
        self._last_stamp_ns = 0

    @property
    def num_pages(self) -> int:
        return len(self._places)

    @property
    def bytes_used(self) -> int:
        return self._accounts.total

    def bytes_of(self, owner: bytes) -> int:
        return self._accounts.bytes_of(owner)

    def holds(self, key: PageKey) -> bool:
        return key in self._places

    def set_limit(self, owner: bytes, num_bytes: int | None) -> None:
        with self._lock:
            self._accounts.set_limit(owner, num_bytes)

    def set_reserve(self, owner: bytes, num_bytes: int) -> None:
        with self._lock:
            self._accounts.set_reserve(owner, num_bytes)

    def claim(self, run: PageRun) -> bool:
        """Count the bytes of a file that is about to be written; False, and nothing counted, if there is no room."""
        with self._lock:
            if self._accounts.total + run.num_bytes > self.max_bytes:
                return False
            self._claim(run)
            return True

    def publish(self, run: PageRun) -> None:
        """From now on the pages of a claimed file are found; those that an older file has too are found here."""
        with self._lock:
            self._publish(run)

    def add(self, run: PageRun) -> None:
        """Count and publish a file that is there already, whether or not there is room for it."""
        with self._lock:
            self._claim(run)
            self._publish(run)

    def retire(self, run: PageRun) -> bool:
        """Nothing finds the file any more; False if somebody else has retired it before."""
        with self._lock:
            queue = self._queues.get(run.owner, OrderedDict())
            if queue.pop(run.name, None) is None:
                return False
            if not queue:
                del self._queues[run.owner]
            self._unlisted[run.name] = run
            for key in run.header.keys if run.header is not None else ():
                self._unplace(run, key)
            self._emptied.pop(run.name, None)
            return True

    def discharge(self, run: PageRun) -> None:
        """A claimed or retired file is gone from the disk."""
        with self._lock:
            del self._unlisted[run.name]
            self._accounts.change(run.owner, -run.num_bytes)

    def unremovable(self, run: PageRun, now_ns: int) -> None:
        """A retired file resists: its bytes stay counted, as nobody's, and it is tried again in its turn."""
        with self._lock:
            del self._unlisted[run.name]
            self._accounts.change(run.owner, -run.num_bytes)
            remains = PageRun(run.name, run.num_bytes, None, self._new_stamp(now_ns))
            self._claim(remains)
            self._publish(remains)

    def forget(self, key: PageKey) -> None:
        """The page is not found any more."""
        with self._lock:
            if key in self._places:
                self._unplace(self._places[key][0], key)

    def forget_owner(self, owner: bytes) -> int:
        """No page in a party's files is found any more; returns how many were."""
        with self._lock:
            before = len(self._places)
            for run in self._queues.get(owner, OrderedDict()).values():
                for key in run.header.keys if run.header is not None else ():
                    self._unplace(run, key)
            return before - len(self._places)

    def touch(self, run: PageRun, now_ns: int) -> int | None:
        """The file was used just now; returns its new stamp, or None if it is gone from the index."""
        with self._lock:
            queue = self._queues.get(run.owner, OrderedDict())
            if run.name not in queue:
                return None
            queue.move_to_end(run.name)
            run.used_at_ns = self._new_stamp(now_ns)
            return run.used_at_ns

    def new_stamp(self, now_ns: int) -> int:
        """The time, or a little later where that was given already."""
        with self._lock:
            return self._new_stamp(now_ns)

    def stretches(self, keys: Sequence[PageKey]) -> list[Stretch]:
        """Where the longest held prefix of `keys` lies, neighbours together."""
        found: list[Stretch] = []
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is None or place[0].header is None:
                    break
                run, number = place
                last = found[-1] if found else None
                if last is not None and last.run is run and last.first + last.count == number:
                    found[-1] = Stretch(run, last.header, last.first, last.count + 1)
                else:
                    found.append(Stretch(run, place[0].header, number, 1))
        return found

    def names_holding(self, keys: Iterable[PageKey]) -> set[str]:
        """The files in which any of `keys` is found."""
        with self._lock:
            return {self._places[key][0].name for key in keys if key in self._places}

    def emptied_runs(self) -> list[PageRun]:
        """Files whose every page was forgotten, or is found in a newer one."""
        with self._lock:
            return list(self._emptied.values())

    def victims_for(self, owner: bytes | None, num_bytes: int, kept: Collection[str]) -> list[PageRun] | None:
        """The files to remove so that `owner` can have `num_bytes` more; None if no choice makes that room.

        Files named in `kept` stay. Changes nothing.
        """
        with self._lock:
            choice = VictimChoice(self._accounts, self._queues, kept)
            return choice.victims if choice.make_room(owner, num_bytes, self.max_bytes) else None

    def victims_over_limits(self) -> list[PageRun]:
        """The files to remove so that no party has more than its limit."""
        with self._lock:
            choice = VictimChoice(self._accounts, self._queues, ())
            choice.enforce_limits()
            return choice.victims

    def check_integrity(self) -> None:
        """Recount everything from scratch."""
        with self._lock:
            listed = [run for queue in self._queues.values() for run in queue.values()]
            names = [run.name for run in (*listed, *self._unlisted.values())]
            assert len(set(names)) == len(names), "a file is counted twice"
            self._check_bytes([*listed, *self._unlisted.values()])
            self._check_places(listed)
            emptied = {run.name for run in listed if run.header is not None and not run.num_live}
            assert emptied == self._emptied.keys(), "a file without pages is not to be swept, or another is"
            for queue in self._queues.values():
                stamps = [run.used_at_ns for run in queue.values()]
                assert stamps == sorted(stamps), "a queue is out of order"

    def _check_bytes(self, runs: list[PageRun]) -> None:
        by_owner: defaultdict[bytes | None, int] = defaultdict(int)
        for run in runs:
            by_owner[run.owner] += run.num_bytes
        self._accounts.check_integrity(by_owner)

    def _check_places(self, listed: list[PageRun]) -> None:
        living = {id(run): 0 for run in listed}
        for key, (run, number) in self._places.items():
            assert id(run) in living, f"a page lies in {run.name}, which is not listed"
            assert run.header is not None
            assert run.header.keys[number] == key, f"{run.name} holds another page at {number}"
            living[id(run)] += 1
        for run in listed:
            assert living[id(run)] == run.num_live, f"{run.name}: {run.num_live} pages counted, {living[id(run)]} found"

    def _claim(self, run: PageRun) -> None:
        assert run.name not in self._unlisted, f"{run.name} is claimed already"
        self._unlisted[run.name] = run
        self._accounts.change(run.owner, run.num_bytes)

    def _publish(self, run: PageRun) -> None:
        """Enter a claimed file as the one used last, even if others were used while it was written."""
        del self._unlisted[run.name]
        self._last_stamp_ns = run.used_at_ns = max(self._last_stamp_ns, run.used_at_ns)
        self._queues.setdefault(run.owner, OrderedDict())[run.name] = run
        for number, key in enumerate(run.header.keys if run.header is not None else ()):
            if key in self._places:
                self._unplace(self._places[key][0], key)
            self._places[key] = (run, number)
            run.num_live += 1

    def _unplace(self, run: PageRun, key: PageKey) -> None:
        place = self._places.get(key)
        if place is not None and place[0] is run:
            del self._places[key]
            run.num_live -= 1
            if not run.num_live:
                self._emptied[run.name] = run

    def _new_stamp(self, now_ns: int) -> int:
        self._last_stamp_ns = max(self._last_stamp_ns + 1, now_ns)
        return self._last_stamp_ns
