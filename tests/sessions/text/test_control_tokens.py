"""Marks around literals that would become control tokens."""

from graftwork.sessions.text.control_tokens import CANDIDATES, ControlLiterals, ControlMarks, TextPiece

LITERALS = ControlLiterals(["<end>", "<end>>"], ["<call>"])


def marks_for(*values: object) -> ControlMarks:
    marks = LITERALS.marks_for(values, "")
    assert marks is not None
    return marks


def test_text_without_literals_needs_no_marks() -> None:
    """Nothing is marked where nothing spells a control token."""
    assert LITERALS.marks_for([{"a": ["<end", 1, None]}], "<end>") is None


def test_longest_literal_is_marked() -> None:
    """Of two literals that begin alike the longer one is taken."""
    marks = marks_for("a<end>>b")

    assert list(marks.split(marks.mark("a<end>>b"))) == [
        TextPiece("a", is_plain=False),
        TextPiece("<end>>", is_plain=True),
        TextPiece("b", is_plain=False),
    ]


def test_marks_occur_nowhere_in_the_text() -> None:
    """A text that holds the first candidates, as a value, a key or in the template, gets others."""
    taken = [chr(candidate) for candidate in CANDIDATES[:3]]
    marks = LITERALS.marks_for([taken[0], {taken[1]: "<end>"}], taken[2])
    assert marks is not None

    pieces = list(marks.split("".join(taken) + marks.mark("<end>")))

    assert pieces == [TextPiece("".join(taken), is_plain=False), TextPiece("<end>", is_plain=True)]


def test_mark_without_partner_still_splits() -> None:
    """A template that cuts a marked literal apart cannot join its halves with others."""
    marks = marks_for("<end>")
    marked = marks.mark("<end>")

    pieces = list(marks.split("<e" + marked[0] + "nd>" + marked[-1]))

    assert pieces == [TextPiece("<e", is_plain=False), TextPiece("nd>", is_plain=False)]


def test_whatever_is_nested_is_marked() -> None:
    """Keys, lists and values of any depth are marked; numbers stay."""
    value = {"<call>": [1, True, None, {"k": "<end>"}]}
    marks = marks_for(value)

    marked = marks.mark(value)

    assert marked == {marks.mark("<call>"): [1, True, None, {"k": marks.mark("<end>")}]}


def test_marked_literal_is_known_by_its_mark() -> None:
    """A literal from outside can be told from the template's own."""
    marks = marks_for("<end>")
    text = "<end>" + marks.mark("<end>")

    assert not marks.is_marked(text, 0)
    assert marks.is_marked(text, text.rindex("<end>"))
