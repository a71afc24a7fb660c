"""How relations are put into words. A question is a template filled with a name or with a description."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """Templates of one relation.

    ``ask``: questions for the value; ``{x}`` is the subject. ``follow``: descriptions of the value, to be put in
    place of ``{x}`` of another question. ``invert``: descriptions of the subject by its value ``{v}``.
    """

    ask: tuple[str, ...]
    follow: tuple[str, ...] = ()
    invert: tuple[str, ...] = ()


WORDINGS = {
    "capital": Wording(
        ask=("What is the capital of {x}?", "Which city is the capital of {x}?", "Name the capital of {x}."),
        invert=("the country whose capital is {v}", "the country with the capital {v}"),
    ),
    "highest point": Wording(
        ask=(
            "What is the highest point of {x}?",
            "What is the highest point in {x}?",
            "Name the highest point of {x}.",
        ),
        invert=("the country whose highest point is {v}", "the country with the highest point {v}"),
    ),
    "lowest point": Wording(
        ask=(
            "What is the lowest point of {x}?",
            "What is the lowest point in {x}?",
            "Name the lowest point of {x}.",
        ),
        invert=("the country whose lowest point is {v}", "the country with the lowest point {v}"),
    ),
    "currency": Wording(
        ask=("What is the currency of {x}?", "Which currency is used in {x}?", "Name the currency of {x}."),
        invert=("the country whose currency is the {v}", "the country that has {v} as its currency"),
    ),
    "national anthem": Wording(
        ask=("What is the national anthem of {x}?", "What is the title of the national anthem of {x}?"),
        invert=('the country whose national anthem is "{v}"', 'the country with the national anthem "{v}"'),
    ),
    "internet country code": Wording(
        ask=("What is the internet country code of {x}?", "Which internet country code does {x} have?"),
        invert=(
            "the country whose internet country code is {v}",
            "the country with the internet country code {v}",
        ),
    ),
    "aircraft registration prefix": Wording(
        ask=(
            "What is the aircraft registration prefix of {x}?",
            "Which aircraft registration prefix does {x} have?",
            "Which prefix is used for the registration of civil aircraft of {x}?",
        ),
        invert=(
            "the country whose aircraft registration prefix is {v}",
            "the country with the aircraft registration prefix {v}",
        ),
    ),
    "independence date": Wording(
        ask=(
            "What is the independence date of {x}?",
            "On what date did {x} gain independence?",
            "When did {x} become independent?",
        ),
        invert=(
            "the country whose independence date is {v}",
            "the country that gained independence on {v}",
        ),
    ),
    "national symbol": Wording(
        ask=("What is the national symbol of {x}?", "Name the national symbol of {x}."),
        invert=("the country whose national symbol is the {v}", "the country with the national symbol {v}"),
    ),
    "legislature": Wording(
        ask=("What is the legislature of {x} called?", "What is the name of the legislature of {x}?"),
        invert=("the country whose legislature is the {v}", "the country with a legislature called {v}"),
    ),
    "official language": Wording(
        ask=("What is the official language of {x}?", "Which official language does {x} have?"),
        invert=("the country whose official language is {v}", "the country with the official language {v}"),
    ),
    "located in": Wording(
        ask=(
            "In which country is {x} located?",
            "Which country is {x} located in?",
            "What country is {x} in?",
        ),
        follow=("the country where {x} is located", "the country that {x} is located in"),
    ),
    "atomic number": Wording(
        ask=("What is the atomic number of {x}?", "Which atomic number does {x} have?"),
        invert=(
            "the chemical element with atomic number {v}",
            "the chemical element whose atomic number is {v}",
        ),
    ),
    "discovered by": Wording(
        ask=("Who discovered {x}?", "By whom was {x} discovered?"),
        invert=("the chemical element discovered by {v}", "the chemical element that {v} discovered"),
    ),
    "discovered in": Wording(
        ask=("In which country was {x} discovered?", "Where was {x} discovered?"),
        follow=("the country where {x} was discovered", "the country in which {x} was discovered"),
    ),
}

_WITH_ARTICLE = re.compile(
    r"^(United|Democratic Republic|Republic of|Federated|British|Central African|Dominican Republic|Holy See"
    r"|Netherlands|Philippines|Maldives|Czech|Isle of|Gaza|West Bank|Bahamas|Gambia|Comoros)|Islands$|Lands$"
)


def subject(kind: str, name: str) -> str:
    """Return ``name`` as a sentence needs it: with its article, or with the word "chemical element"."""
    if kind == "element":
        return f"the chemical element {name}"
    if name.startswith("The "):
        return f"the {name.removeprefix('The ')}"
    return f"the {name}" if kind == "country" and _WITH_ARTICLE.search(name) else name
