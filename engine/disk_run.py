"""A file of the disk tier, as the index knows it."""

from dataclasses import dataclass

from graftwork.engine.page_file import PageFileHeader


@dataclass(slots=True, eq=False)
class PageRun:
    """One file: a run of pages that were written together."""

    name: str
    num_bytes: int
    header: PageFileHeader | None
    """None where the pages are not ours to read: another layout's file, or one that could not be removed."""
    used_at_ns: int
    num_live: int = 0
    """Pages that the index finds here; fewer than there are once some are forgotten."""

    @property
    def num_pages(self) -> int:
        """Pages in the file."""
        return len(self.header.keys) if self.header is not None else 0

    @property
    def owner(self) -> bytes | None:
        """The party that the bytes are counted against; None for what nobody can read."""
        return self.header.owner if self.header is not None else None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring pages of one file, to be read at once."""

    run: PageRun
    header: PageFileHeader
    first: int
    count: int
