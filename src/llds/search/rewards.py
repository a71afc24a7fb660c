"""Rewards by rule: exact match as Search-R1 scores it, token F1, substring match, a well-formed episode."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

_WHOLE = frozenset(("yes", "no", "noanswer"))

_INSIDE = r"(?:(?!</?(?:think|search|information|answer)>).)*"


def _block(tag: str) -> str:
    return rf"<{tag}>{_INSIDE}</{tag}>\s*"


_VALID_EPISODE = re.compile(
    rf"\s*(?:{_block('think')}{_block('search')}{_block('information')})*{_block('think')}{_block('answer')}",
    re.DOTALL,
)
_VALID_WITHOUT_THINKING = re.compile(
    rf"\s*(?:(?:{_block('think')})?{_block('search')}{_block('information')})*"
    rf"(?:{_block('think')})?{_block('answer')}",
    re.DOTALL,
)


def normalize_answer(text: str) -> str:
    """Lower the case, drop ASCII punctuation, then the articles a, an, the, then surplus white space.

    In that order, so ``a.`` is an article and ``U.S.`` is ``us``; other scripts' punctuation and accents
    stay.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def extract_answer(response: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>`` of the response alone, stripped, or ``None``.

    Search-R1 reads prompt and response together and therefore wants two matches, since its prompt holds an
    example. Here the prompt is never passed.
    """
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def exact_match(answer: str | None, golden_answers: str | Sequence[str]) -> float:
    """Return 1.0 when the normalised ``answer`` equals one of the normalised ``golden_answers``, else 0.0.

    No answer (``None``) is 0.0. As in Search-R1 a golden answer of articles and punctuation alone is
    matched by an empty answer.
    """
    return float(answer is not None and normalize_answer(answer) in _normalized(golden_answers))


def substring_match(answer: str | None, golden_answers: str | Sequence[str]) -> float:
    """Return 1.0 when a normalised golden answer lies within the normalised ``answer``, else 0.0."""
    if answer is None:
        return 0.0
    normalized = normalize_answer(answer)
    return float(any(golden in normalized for golden in _normalized(golden_answers)))


def f1_score(answer: str | None, golden_answers: str | Sequence[str]) -> float:
    """Return the best F1 over ``golden_answers``, in [0, 1], between the words of the normalised answers.

    As in HotpotQA's own scorer, yes, no and "noanswer" share no words with anything but themselves. Two empty
    answers agree (1.0, as in SQuAD 2); an empty and a non-empty one don't (0.0).
    """
    if answer is None:
        return 0.0
    normalized = normalize_answer(answer)
    return max((_text_f1(normalized, golden) for golden in _normalized(golden_answers)), default=0.0)


def valid_format(response: str, require_think: bool = True) -> float:
    """Return 1.0 when the response is a whole, well-formed episode, else 0.0.

    Well-formed: any number of think, search, information; then think, answer; nothing but white space
    between. ``require_think=False``: the think blocks may be absent.
    """
    pattern = _VALID_EPISODE if require_think else _VALID_WITHOUT_THINKING
    return float(pattern.fullmatch(response) is not None)


def _normalized(golden_answers: str | Sequence[str]) -> list[str]:
    golden_answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return [normalize_answer(golden) for golden in golden_answers]


def _text_f1(answer: str, golden: str) -> float:
    if answer != golden and not _WHOLE.isdisjoint((answer, golden)):
        return 0.0
    return _word_f1(answer.split(), golden.split())


def _word_f1(answer: list[str], golden: list[str]) -> float:
    if not answer or not golden:
        return float(answer == golden)
    shared = (Counter(answer) & Counter(golden)).total()
    return 2 * shared / (len(answer) + len(golden))
