"""Tests of the cells and details of `graftwork top`."""

import pytest

from graftwork.api.cli.top.panes import ADAPTERS, ENGINES, PANES, SESSIONS, TENANTS, ago, details, number, plain, totals
from tests.api.cli.top.overviews import overview, tenant

HOSTILE = "\x1b[2J[bold]\u202eevil\n<script>" + "x" * 200


@pytest.mark.parametrize("pane", PANES, ids=lambda pane: pane.name)
def test_a_table_fits_eighty_columns(pane: object) -> None:
    """The columns of each table fit a terminal of 80 characters, and each cell fills its column exactly."""
    assert pane in PANES
    for one in PANES:
        assert sum(column.width for column in one.columns) <= 80
        for row in one.rows(overview()):
            assert [len(text) for text in one.cells(row, overview())] == [column.width for column in one.columns]


def test_the_cells_of_each_pane() -> None:
    """Each table shows the figures of the snapshot, with names in place of ids."""
    shown = overview()
    cells = [[text.strip() for text in pane.cells(pane.rows(shown)[0], shown)] for pane in PANES]

    assert cells[0] == ["engine-0", "ready", "2", "1", "812", "31%", "44%", "412", "38", "9.8", "1"]
    assert cells[1] == ["Acme", "2", "1", "0.5", "38", "84", "411", "24", "3", "–", "0.4"]
    assert cells[2] == ["support@3", "Acme", "device", "2", "0", "0.5", "411"]
    assert cells[3][:6] == ["ses_01hzx", "support@3", "running", "2304", "96%", "7"]


def test_hostile_names_are_plain_characters() -> None:
    """Control characters and marks that turn the direction become dots, and a long name is cut."""
    shown = overview([tenant(1, name=HOSTILE)])
    cell = TENANTS.cells(shown.tenants[0], shown)[0]

    assert len(cell) == TENANTS.columns[0].width
    assert cell.startswith("·[2J[bold]·evil·")
    assert plain(details(shown.tenants[0], shown).replace("\n", "")) == details(shown.tenants[0], shown).replace(
        "\n", ""
    )


def test_unknown_figures_are_dashes() -> None:
    """An engine that reports nothing has dashes, not zeros."""
    engine = {"id": "engine-1", "status": "absent", "epoch": None, "address": "unix:x", "version": None}
    shown = overview(engines=[engine])

    assert [text.strip() for text in ENGINES.cells(shown.engines[0], shown)] == ["engine-1", "absent", *["–"] * 9]


def test_orders_of_the_terminal() -> None:
    """Orders that the server does not make are made here; its own are kept."""
    rows = [{**overview().sessions[0].raw, "id": f"ses_{one}", "tokens": one} for one in (2, 3, 1)]
    shown = overview(sessions=rows)

    assert [row.tokens for row in SESSIONS.sorted_rows(shown, "tokens")] == [3, 2, 1]
    assert [row.tokens for row in SESSIONS.sorted_rows(shown, "activity")] == [2, 3, 1]


def test_details_have_every_field() -> None:
    """The details of a row name all its fields, and its tenant by name."""
    shown = overview()
    text = details(ADAPTERS.rows(shown)[0], shown)

    assert {line.split()[0] for line in text.splitlines()} == {*shown.adapters[0].raw, "tenant"}
    assert "tenant          Acme" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0, "0"), (950.4, "950"), (9999, "9999"), (12_400, "12.4k"), (3_140_000, "3.1M")],
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    """A number takes at most six characters."""
    assert number(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(-1, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (200_000, "2d")])
def test_times_are_short(seconds: float, shown: str) -> None:
    """A duration is one number with its unit."""
    assert ago(seconds) == shown


def test_the_line_of_totals_fits() -> None:
    """The line above the tables fits 80 characters."""
    assert len(totals(overview())) <= 80 + 10
