"""Tests files of KV pages that are encrypted: what is on the disk, whose key reads it, and what damage does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.file_format import decode_header
from graftwork.engine.kv.disk.store import DiskStore
from tests.engine.faulty_disk import (
    ONE_PAGE_FILE,
    PAGE_BYTES,
    FaultyFiles,
    chain,
    domain_named,
    opened,
    pages_of,
    quick_folder,
    readable,
    store,
)
from tests.engine.kv.disk.test_object_pages import Engine, objects
from tests.engine.kv.disk.test_shared import kill, page_files, read, taken

KEY, OTHER_KEY = KvFileKey(b"k" * 32), KvFileKey(b"o" * 32)
KEYS = chain("a", 4)
X = domain_named("x")


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_folder() as place:
        yield Path(place)


def encrypted(folder: Path, key: KvFileKey = KEY) -> DiskStore:
    """Returns an open store whose domain x has a key."""
    disk = opened(folder)
    disk.unlock(X, key)
    return disk


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def sealed_file(folder: Path) -> bytes:
    (path,) = folder.glob("*.kvpages")
    return path.read_bytes()


def flipped(field: bytes) -> bytes:
    return bytes([field[0] ^ 4]) + field[1:]


def test_no_page_is_on_the_disk_as_it_is(root: Path) -> None:
    """A plain file has the bytes of each page, the encrypted file of the same pages has none of them, and is as long."""
    plain, sealed = opened(root / "plain"), encrypted(root / "sealed")
    for disk in (plain, sealed):
        assert store(disk, "x", KEYS) == len(KEYS)

    contents = [only_file(root / name).read_bytes() for name in ("plain", "sealed")]

    assert len(contents[0]) == len(contents[1])
    for page in pages_of(KEYS):
        pieces = [page[at : at + 16] for at in range(0, PAGE_BYTES, 16)]
        assert all(piece in contents[0] for piece in pieces)
        assert not any(piece in contents[1] for piece in pieces)
    assert readable(sealed, KEYS) == KEYS
    sealed.check_integrity()


def test_the_same_page_is_never_encrypted_the_same(root: Path) -> None:
    """Two files of the same page under the same key have nothing in common."""
    bodies = []
    for name in ("first", "second"):
        store(encrypted(root / name), "x", KEYS[:1])
        bodies.append(only_file(root / name).read_bytes()[-PAGE_BYTES:])

    assert not {bodies[0][at : at + 8] for at in range(PAGE_BYTES)} & {
        bodies[1][at : at + 8] for at in range(PAGE_BYTES)
    }


def test_after_a_restart_pages_are_found_when_the_key_has_come(root: Path) -> None:
    """A restart knows the pages without a key, finds none of them, and reads all of them once the key is there."""
    first = encrypted(root)
    store(first, "x", KEYS)
    first.close()

    disk = opened(root)

    assert disk.num_pages == len(KEYS)
    assert not any(map(disk.holds, KEYS))
    assert readable(disk, KEYS) == []
    assert disk.counters.corrupt == 0
    assert not disk.unlock(X, KEY)
    assert all(map(disk.holds, KEYS))
    assert readable(disk, KEYS) == KEYS


@pytest.mark.parametrize("change", ["flip a page", "flip a tag", "flip the salt", "cut", "another key"])
def test_a_wrong_file_is_a_miss_and_is_removed(root: Path, change: str) -> None:
    """Whatever is wrong with an encrypted file, nothing wrong is read, the file goes, and its damage is counted."""
    first = encrypted(root)
    store(first, "x", KEYS[:1])
    first.close()
    path = only_file(root)
    content = path.read_bytes()
    header, page = decode_header(content), bytearray(content[-PAGE_BYTES:])
    if change == "flip a page":
        page[9] ^= 4
    changed = {
        "flip a tag": replace(header, checksums=flipped(header.checksums)),
        "flip the salt": replace(header, salt=flipped(header.salt or b"")),
    }
    content = changed.get(change, header).encode() + page
    path.write_bytes(content)

    disk = encrypted(root, OTHER_KEY if change == "another key" else KEY)
    if change == "cut":
        path.write_bytes(content[:-1])
    space = bytearray(PAGE_BYTES)

    assert not disk.read(KEYS[0], memoryview(space))
    assert list(root.iterdir()) == []
    assert disk.counters.corrupt == 1
    assert not disk.holds(KEYS[0])
    disk.check_integrity()


def test_no_page_stands_in_the_place_of_another(root: Path) -> None:
    """With a right header checksum over exchanged names, domains or pages, no page decrypts."""
    disk = encrypted(root)
    disk.unlock(domain_named("y"), KEY)
    store(disk, "x", KEYS[:2])
    path = only_file(root)
    content = path.read_bytes()
    header = decode_header(content)
    body = content[header.header_bytes :]
    forged = {
        "names": (replace(header, keys=header.keys[::-1]), body),
        "domain": (replace(header, domain=domain_named("y")), body),
        "pages": (
            replace(header, checksums=header.checksum(1) + header.checksum(0)),
            body[PAGE_BYTES:] + body[:PAGE_BYTES],
        ),
    }
    disk.close()

    for name, (other, pages) in forged.items():
        path.write_bytes(other.encode() + pages)
        again = encrypted(root)
        again.unlock(domain_named("y"), KEY)
        assert all(map(again.holds, KEYS[:2])), name
        assert readable(again, KEYS[:2]) == [], name
        again.close()


def test_another_tenants_key_reads_nothing(root: Path) -> None:
    """A file of x in which only the owner's name was changed to y is not read with y's key."""
    disk = opened(root)
    disk.unlock(X, KEY)
    disk.unlock(domain_named("y"), OTHER_KEY)
    store(disk, "x", KEYS)
    store(disk, "y", chain("b", 2))

    assert readable(disk, [*KEYS, *chain("b", 2)]) == [*KEYS, *chain("b", 2)]
    disk.unlock(X, OTHER_KEY)
    assert readable(disk, KEYS) == []
    assert readable(disk, chain("b", 2)) == chain("b", 2)


def test_plain_files_go_when_the_first_key_comes(root: Path) -> None:
    """What a domain has in plain files is not read any more and is swept; other domains keep theirs."""
    disk = opened(root)
    store(disk, "x", KEYS)
    store(disk, "y", chain("b", 2))

    assert disk.unlock(X, KEY)
    assert readable(disk, KEYS) == []
    disk.sweep()
    assert len(list(root.iterdir())) == 1
    assert store(disk, "x", KEYS) == len(KEYS)
    assert not disk.unlock(X, KEY)
    assert readable(disk, [*KEYS, *chain("b", 2)]) == [*KEYS, *chain("b", 2)]
    assert disk.counters.corrupt == 0
    disk.check_integrity()


def test_a_plain_file_that_somebody_puts_there_is_not_read(root: Path) -> None:
    """A plain file of a domain with a key, with right checksums, is never answered."""
    forger = opened(root)
    forger.write(X, KEYS[:1], [b"f" * PAGE_BYTES])
    forger.close()
    disk = encrypted(root)

    assert not disk.holds(KEYS[0])
    assert not disk.read(KEYS[0], memoryview(bytearray(PAGE_BYTES)))


def test_a_key_that_comes_during_a_write_leaves_no_plain_page(root: Path) -> None:
    """A plain file that was being written when the key came is not found afterwards, and is swept."""

    class Interrupted(FaultyFiles):
        def rename(self, name: str, new_name: str) -> None:
            disk.unlock(X, KEY)
            super().rename(name, new_name)

    disk = opened(root, files=Interrupted(root))
    store(disk, "x", KEYS)
    disk.sweep()

    assert not any(map(disk.holds, KEYS))
    assert list(root.iterdir()) == []


def test_nothing_is_written_after_the_key_was_destroyed(root: Path) -> None:
    """After its domain was forgotten, late pages are not written, a restored file is a miss, and a new key too."""
    disk = encrypted(root)
    store(disk, "x", KEYS)
    path = only_file(root)
    backup = path.read_bytes()
    disk.forget_domain(X)
    disk.sweep()

    assert store(disk, "x", KEYS) == 0
    assert list(root.iterdir()) == []
    disk.close()
    path.write_bytes(backup)
    again = opened(root)
    assert readable(again, KEYS) == []
    again.unlock(X, OTHER_KEY)
    assert readable(again, KEYS) == []
    assert list(root.iterdir()) == []
    assert again.counters.corrupt == 1


def test_an_erasure_during_a_write_leaves_nothing(root: Path) -> None:
    """When the domain is forgotten while its first file is written, that file is swept, and no other one is written."""

    class Interrupted(FaultyFiles):
        def rename(self, name: str, new_name: str) -> None:
            disk.forget_domain(X)
            super().rename(name, new_name)

    disk = opened(root, max_bytes=3 * ONE_PAGE_FILE, files=Interrupted(root))
    disk.unlock(X, KEY)

    assert store(disk, "x", KEYS) == 1
    disk.sweep()
    assert list(root.iterdir()) == []
    assert disk.counters.written == 1


def test_a_domain_without_a_key_is_forgotten_as_before(root: Path) -> None:
    """A domain that never had a key is written again after it was forgotten."""
    disk = opened(root)
    store(disk, "x", KEYS)
    disk.forget_domain(X)

    assert store(disk, "x", KEYS) == len(KEYS)
    assert readable(disk, KEYS) == KEYS


def test_locked_pages_are_written_anew(root: Path) -> None:
    """Without its key, the same prompt is stored again, and the locked file, which holds nothing any more, is swept."""
    first = encrypted(root)
    store(first, "x", KEYS)
    first.close()
    disk = opened(root)

    assert store(disk, "x", KEYS) == len(KEYS)
    assert readable(disk, KEYS) == KEYS
    disk.sweep()
    assert decode_header(only_file(root).read_bytes()).salt is None
    disk.check_integrity()


def test_engines_of_a_folder_need_the_key_each(root: Path) -> None:
    """An engine reads another's encrypted pages once the key has come to it, too, and never a plain page after that."""
    first, second = taken(root), taken(root)
    first.unlock(X, KEY)
    first.write(X, KEYS, pages_of(KEYS))
    second.refresh()

    assert not any(map(second.holds, KEYS))
    assert read(second, KEYS) == []
    second.unlock(X, KEY)
    assert all(map(second.holds, KEYS))
    assert read(second, KEYS) == KEYS
    kill(first)
    successor = taken(root)
    successor.unlock(X, KEY)
    assert read(successor, KEYS) == KEYS
    assert all(decode_header(path.read_bytes()).salt for path in page_files(root))


def test_a_wrong_key_harms_no_file_of_another_engine(root: Path) -> None:
    """An engine with another key reads nothing, and the owner still reads its file."""
    first, second = taken(root), taken(root)
    first.unlock(X, KEY)
    first.write(X, KEYS, pages_of(KEYS))
    second.unlock(X, OTHER_KEY)
    second.refresh()

    assert read(second, KEYS) == []
    assert read(first, KEYS) == KEYS


def test_a_bucket_holds_what_the_disk_holds(root: Path) -> None:
    """An engine's object is its encrypted file; another engine reads it with the key, and not with a wrong one."""
    first, second, third = Engine(root, "a"), Engine(root, "b"), Engine(root, "c")
    first.store.unlock(X, KEY)
    first.write(KEYS)
    for engine in (second, third):
        engine.store.refresh()

    assert [path.read_bytes() for path in objects(root)] == [sealed_file(root / "a")]
    assert second.read(KEYS) == []
    second.store.unlock(X, KEY)
    assert second.read(KEYS) == KEYS
    third.store.unlock(X, OTHER_KEY)
    assert third.read(KEYS) == []
    assert third.store.counters.corrupt == 1


def test_plain_objects_go_when_the_first_key_comes(root: Path) -> None:
    """A domain's plain objects are removed from the bucket by the engine that gets its key."""
    first = Engine(root, "a")
    first.write(KEYS)
    assert len(objects(root)) == 1

    assert first.store.unlock(X, KEY)
    first.store.sweep()

    assert objects(root) == []
    first.write(KEYS)
    first.lose_own_files()
    assert first.read(KEYS) == KEYS
    first.store.check_integrity()


def test_the_index_counts_all_pages_and_finds_those_of_keys(root: Path) -> None:
    """Eviction needs no key: a folder of encrypted files without keys keeps its budget."""
    first = encrypted(root)
    for number in range(6):
        store(first, "x", chain(str(number), 1))
    first.close()

    disk = opened(root, max_bytes=2 * (4096 + PAGE_BYTES))

    assert disk.counters.evicted == 4
    assert disk.num_pages == 2
    disk.unlock(X, KEY)
    assert [disk.holds(chain(str(number), 1)[0]) for number in range(6)] == [False] * 4 + [True] * 2
    disk.check_integrity()
