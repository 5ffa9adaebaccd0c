"""Parses server-sent events from bytes that arrive in any pieces. Source: the HTML standard, section 9.2."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Frame:
    """One event. `event` is "message" and `id` is None by default."""

    event: str
    data: str
    id: str | None = None


@dataclass(slots=True)
class FrameParser:
    """Parses bytes. Yields each frame as soon as its blank line has arrived."""

    _rest: bytes = b""
    _event: str = ""
    _id: str | None = None
    _data: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        text = self._rest + chunk
        # A carriage return at the very end may be half of a line end: it waits for what follows.
        held = len(text) - 1 if text.endswith(b"\r") else len(text)
        lines = text[:held].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + text[held:]
        for line in lines:
            frame = self._take(line.decode("utf-8", errors="replace"))
            if frame is not None:
                yield frame

    def _take(self, line: str) -> Frame | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "id":
                self._id = value
        return None  # a comment has an empty name

    def _dispatch(self) -> Frame | None:
        frame = Frame(self._event or "message", "\n".join(self._data), self._id) if self._data else None
        self._event, self._id, self._data = "", None, []
        return frame
