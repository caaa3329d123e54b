"""The page that shows what each table sends holds what the command prints now, and the book agrees."""

from pathlib import Path

from usp.mesh import TABLES
from usp.tools.schemes import HEAD, schemes

PAGE = Path(__file__).resolve().parents[2] / "tools" / "bench" / "LOG.md"


def test_the_page_is_what_is_printed() -> None:
    text = schemes()
    assert text in PAGE.read_text(encoding="utf-8"), "replace it by: python -m usp.tools.schemes"
    for name in (*TABLES, "tp_sp"):
        assert f"| `{name}` on " in text


def test_what_is_sent_is_what_the_book_says() -> None:
    counted, book = HEAD.index("forward"), HEAD.index("by the book, each way")
    rows = [line.strip("| ").split(" | ") for line in schemes().splitlines()[2:]]
    rows = [row for row in rows if len(row) == len(HEAD)]
    assert len(rows) >= 11
    for row in rows:
        sent = [cell.rpartition(": ")[2] for cell in row[counted : counted + 2]]
        assert ", ".join(sent) == row[book], row
