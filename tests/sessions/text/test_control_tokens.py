"""Tests of escaping: text that spells control tokens."""

from graftwork.sessions.text.chat_template import CANDIDATES, ControlTokenEscaper, ControlTokenTexts, PromptPiece

LITERALS = ControlTokenTexts(["<end>", "<end>>"], ["<call>"])


def escaper_for(*values: object) -> ControlTokenEscaper:
    escaper = LITERALS.escaper_for(values, "")
    assert escaper is not None
    return escaper


def test_text_without_literals_needs_no_marks() -> None:
    """There is no escaper if no value spells a control token."""
    assert LITERALS.escaper_for([{"a": ["<end", 1, None]}], "<end>") is None


def test_longest_literal_is_marked() -> None:
    """Of two control tokens with the same start, the longer is escaped."""
    escaper = escaper_for("a<end>>b")

    assert list(escaper.split(escaper.escape("a<end>>b"))) == [
        PromptPiece("a", is_plain=False),
        PromptPiece("<end>>", is_plain=True),
        PromptPiece("b", is_plain=False),
    ]


def test_marks_occur_nowhere_in_the_text() -> None:
    """Mark characters are never characters of a value, a key or the template."""
    taken = [chr(candidate) for candidate in CANDIDATES[:3]]
    escaper = LITERALS.escaper_for([taken[0], {taken[1]: "<end>"}], taken[2])
    assert escaper is not None

    pieces = list(escaper.split("".join(taken) + escaper.escape("<end>")))

    assert pieces == [PromptPiece("".join(taken), is_plain=False), PromptPiece("<end>", is_plain=True)]


def test_mark_without_partner_still_splits() -> None:
    """The halves of an escaped literal that a template cuts apart never join with other text."""
    escaper = escaper_for("<end>")
    escaped = escaper.escape("<end>")

    pieces = list(escaper.split("<e" + escaped[0] + "nd>" + escaped[-1]))

    assert pieces == [PromptPiece("<e", is_plain=False), PromptPiece("nd>", is_plain=False)]


def test_whatever_is_nested_is_marked() -> None:
    """Keys, lists and values of any depth are escaped; numbers stay."""
    value = {"<call>": [1, True, None, {"k": "<end>"}]}
    escaper = escaper_for(value)

    escaped = escaper.escape(value)

    assert escaped == {escaper.escape("<call>"): [1, True, None, {"k": escaper.escape("<end>")}]}


def test_marked_literal_is_known_by_its_mark() -> None:
    """`is_escaped` tells an escaped literal from the template's own."""
    escaper = escaper_for("<end>")
    text = "<end>" + escaper.escape("<end>")

    assert not escaper.is_escaped(text, 0)
    assert escaper.is_escaped(text, text.rindex("<end>"))
