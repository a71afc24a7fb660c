"""106 articles of English Wikipedia (CC BY-SA), from the test data of the package gensim."""

from __future__ import annotations

import bz2
import html
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from llds.data.build.facts import Passage
from llds.data.build.text import chunks

SOURCE = "wikipedia"
_DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_WORDS = 100
_LEAST_WORDS = 20
"""A last passage shorter than this is left out."""


def read_articles(wheel: Path) -> list[tuple[str, str]]:
    """Return ``(title, plain text)`` in the order of the dump; redirects and pages about pages are left out.

    Raises ``OSError``, ``KeyError`` or ``ElementTree.ParseError`` if the wheel or the dump can't be read.
    """
    articles = []
    title = ""
    with zipfile.ZipFile(wheel) as archive:
        dump = bz2.decompress(archive.read(_DUMP))
    for element in ElementTree.fromstring(dump).iter():
        tag = element.tag.rpartition("}")[2]
        if tag == "title":
            title = element.text or ""
        elif tag == "text" and element.text and not _is_aside(title, element.text):
            articles.append((title, plain_text(element.text)))
    return articles


def passages(title: str, text: str) -> Iterator[Passage]:
    """Yield ``text`` in passages of 100 words, as wiki-18 is cut."""
    for index, words in enumerate(chunks(text.split(), _WORDS)):
        if len(words) >= _LEAST_WORDS or index == 0:
            yield Passage(SOURCE, title.replace('"', "'"), " ".join(words))


def plain_text(wikitext: str) -> str:
    """Return ``wikitext`` without markup, tables, references and the lists at the end of an article."""
    text = re.split(
        r"^==\s*(?:See also|References|External links|Further reading|Notes)\s*==", wikitext, flags=re.M
    )[0]
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<ref[^>/]*/>", "", text)
    text = re.sub(r"<(ref|math|gallery|timeline)\b.*?</\1>", "", text, flags=re.S)
    text = _until_still(r"\{\{convert\|([^|{}]*)\|([^|{}]*)[^{}]*\}\}|\{\{[^{}]*\}\}", _unit, text)
    text = _until_still(r"\{\|(?:(?!\{\|).)*?\|\}", lambda _: "", text)
    text = re.sub(
        r"\[\[(?:File|Image|Category|Media):(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]",
        "",
        text,
        flags=re.I,
    )
    text = re.sub(r"\[\[[a-z-]{2,12}:[^\[\]]*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}|__[A-Z]+__", "", text)
    text = html.unescape(re.sub(r"<[^>]+>", " ", html.unescape(text)))
    text = re.sub(r"^=+\s*(.*?)\s*=+\s*$", r"\1.", text, flags=re.M)
    text = re.sub(r"^[*#:;|!]+\s*", "", text, flags=re.M)
    text = re.sub(r"\{\{\w*\|?|\}\}", "", text)
    text = re.sub(r"\(\s*[,;|]*\s*\)", "", text)
    return re.sub(r" +([,;.)])", r"\1", re.sub(r"\s+", " ", text)).strip()


def _is_aside(title: str, wikitext: str) -> bool:
    return wikitext.lstrip()[:9].upper() == "#REDIRECT" or ":" in title[:10]


def _unit(found: re.Match[str]) -> str:
    return f"{found.group(1)} {found.group(2)}" if found.group(1) else ""


def _until_still(pattern: str, replace: Callable[[re.Match[str]], str], text: str) -> str:
    """Replace from the inside out until nothing nested is left."""
    compiled = re.compile(pattern, flags=re.S | re.I)
    while True:
        changed = compiled.sub(replace, text)
        if changed == text:
            return text
        text = changed
