"""Names in URLs."""

from urllib.parse import quote


def segment(name: str) -> str:
    """A name as one path segment, whatever characters it has."""
    return quote(name, safe="@")
