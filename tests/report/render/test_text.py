"""Documents on a terminal: nothing lost, columns aligned."""

from qspec.report.document import Bar, Bars, Details, Document, Finding, Heading, Paragraph, Stack, Table
from qspec.report.render.text import render, table_lines


def test_tables_are_aligned_under_their_heads():
    """Would catch columns that drift, or a head of two lines that hangs from the top."""
    table = Table("", ("", "size\nmin", "\nmax", "n"), (("q_proj", "1.5", "12.25", "30"), ("x", "0", "3", "1")))
    assert table_lines(table) == [
        "        size",
        "         min    max   n",
        "q_proj   1.5  12.25  30",
        "x          0      3   1",
    ]


def test_a_table_without_rows_keeps_its_head():
    """Would catch a crash on an empty table."""
    assert table_lines(Table("", ("a", "b"), ())) == ["a  b"]


def test_every_kind_of_block_is_shown():
    """Would catch a block that the terminal swallows."""
    blocks = (
        Heading("Speed"),
        Finding("good", "faster"),
        Finding("bad", "not equal"),
        Paragraph("Some words."),
        Bars("Rates", (Bar("plain", 1.0, "1.00"), Bar("draft", 2.0, "2.00"), Bar("none", float("nan"), "–"))),
        Stack("Time", ("draft", "verify"), (("arm", (0.25, 0.75)),)),
        Details("Notes", ("one", "two")),
        Details("Recipe", ("name: x",), code=True),
    )
    text = render(Document("Title", "subtitle", blocks))
    assert text.startswith("Title\nsubtitle\n\nSpeed\n-----\n\npass: faster\nfail: not equal\n\nSome words.\n")
    assert "Rates\n       value\nplain   1.00\ndraft   2.00\nnone       –\n" in text
    assert "arm  25.0 %  75.0 %" in text
    assert "Notes\n- one\n- two\n\nRecipe\nname: x\n" in text


def test_long_sentences_are_wrapped():
    """Would catch a line that a terminal breaks inside a word."""
    text = render(Document("t", "", (Finding("open", "word " * 60), Paragraph("word " * 60))))
    assert max(map(len, text.splitlines())) <= 110
