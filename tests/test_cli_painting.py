"""Colours of a trajectory, however it is cut into chunks."""

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from llds.cli.painting import STYLES, Painter

TEXT = (
    "<think> a < b </think>\n<search> x > y </search>\n\n"
    "<information>Doc 1(Title: t) <b>bold</b></information>\n\n"
    "<answer> 7 </answer> done <"
)


def paint(chunks):
    painter = Painter()
    pieces = [piece for chunk in chunks for piece in painter.feed(chunk)] + painter.flush()
    return [
        ("".join(text for text, _ in group), style)
        for style, group in groupby(pieces, key=lambda piece: piece[1])
    ]


def test_spans_take_their_tags_along():
    assert paint([TEXT]) == [
        ("<think> a < b </think>", STYLES["think"]),
        ("\n", ""),
        ("<search> x > y </search>", STYLES["search"]),
        ("\n\n", ""),
        ("<information>Doc 1(Title: t) <b>bold</b></information>", STYLES["information"]),
        ("\n\n", ""),
        ("<answer> 7 </answer>", STYLES["answer"]),
        (" done <", ""),
    ]


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_chunks_make_no_difference(cuts):
    places = [0, *sorted(cuts), len(TEXT)]
    chunks = [TEXT[start:end] for start, end in pairwise(places)]
    assert paint(chunks) == paint([TEXT])


def test_plain_text_is_not_held_back():
    painter = Painter()
    assert painter.feed("2 < 3, and so on for a while") == [("2 < 3, and so on for a while", "")]
    assert painter.feed("<sea") == []
    assert painter.feed("son>") == [("<season>", "")]
