"""Parses server-sent events. The bytes may arrive in pieces of any size. Source: the HTML standard, section 9.2."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event. If the server sent no event name, `event` is "message". If it sent no id, `id` is None."""

    event: str
    data: str
    id: str | None = None


@dataclass(slots=True)
class FrameParser:
    """Parses bytes to server-sent events (frames). A blank line ends a frame: then `feed` yields the frame."""

    _rest: bytes = b""
    _event: str = ""
    _id: str | None = None
    _data: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        text = self._rest + chunk
        # The chunk may end between a carriage return and its line feed. So keep a last carriage return for later.
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
