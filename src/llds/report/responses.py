"""What the policy wrote, token by token: red where it became less likely since its rollout, blue where more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llds.errors import LLDSError
from llds.pages import escape
from llds.training.records import RunFolder, read_lines

#: Tokens of responses on one page; more make a page that browsers open slowly.
MOST_TOKENS = 40_000
# nats; a token is coloured by the highest bound that its displacement reaches.
_BOUNDS = (0.01, 0.03, 0.1, 0.3)

STYLE = """
.response{background:var(--card);border-radius:8px;padding:.5rem .8rem;margin:.6rem 0}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font:14px/1.6 ui-monospace,monospace}
.fed{color:var(--dim);border-left:3px solid var(--grid);padding-left:.6rem;display:block;margin:.3rem 0}
.tokens b{font-weight:400;border-radius:3px}
""" + "".join(
    f".lost{level}{{background:rgba(var(--lost),{alpha})}}.won{level}{{background:rgba(var(--won),{alpha})}}"
    for level, alpha in enumerate((0.15, 0.3, 0.5, 0.75), start=1)
)


def legend() -> str:
    """Return what the colours mean."""
    steps = [f'<b class="{kind}{level}">&nbsp;{bound}&nbsp;</b>' for kind in ("lost", "won")
             for level, bound in enumerate(_BOUNDS, start=1)]  # fmt: skip
    lost, won = "".join(steps[:4]), "".join(steps[4:])
    return (
        f'<p class="tokens">less likely than at its rollout, nats: {lost}  more likely: {won}  '
        '<span class="fed">what was fed back</span></p>'
    )


def sampled_responses(run: RunFolder, rollout_of: Mapping[int, int], wanted: Sequence[int] = ()) -> str:
    """Return the responses that a run wrote out, as many as fit on a page.

    ``rollout_of``: optimizer step → rollout. Of each rollout the last step is taken, where most has changed since;
    ``wanted`` steps (of alarms) come first, then rollouts evenly spread. Raises :class:`LLDSError` for a damaged file.
    """
    files = {_step(path): path for path in sorted(run.trajectories.glob("step-*.jsonl"))}
    last = {rollout_of.get(step, step): step for step in files}
    near = [max((step for step in files if step <= one), default=None) for one in wanted]
    chosen: dict[int, list[dict[str, Any]]] = {}
    spent = 0
    for step in dict.fromkeys([*(one for one in near if one is not None), *_spread(list(last.values()))]):
        responses = read_lines(files[step])
        spent += sum(len(response.get("tokens", ())) for response in responses)
        if spent > MOST_TOKENS and chosen:
            break
        if responses:
            chosen[step] = responses
    blocks = [_step_block(files[step], step, chosen[step], rollout_of.get(step)) for step in sorted(chosen)]
    return "".join(blocks)


def _spread(steps: Sequence[int]) -> Iterable[int]:
    """Return all steps, the ends first, then ever finer between them."""
    count = len(steps)
    order: list[int] = []
    parts = 1
    while count and len(set(order)) < count:
        order += [round(part * (count - 1) / parts) for part in range(parts + 1)]
        parts *= 2
    return [steps[index] for index in dict.fromkeys(order)]


def _step(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _step_block(path: Path, step: int, responses: Sequence[Mapping[str, Any]], rollout: int | None) -> str:
    try:
        inside = "".join(map(_response, responses))
        rewards = ", ".join(f"{response['reward']:g}" for response in responses)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LLDSError(
            f"{path} does not hold responses as llds train writes them ({error!r}); restore the file, or delete it."
        ) from None
    where = f"step {step}" + (f", rollout {rollout}" if rollout is not None else "")
    return f"<details><summary>{where}: rewards {escape(rewards)}</summary>{inside}</details>"


def _response(response: Mapping[str, Any]) -> str:
    golden = ", ".join(map(str, response["golden_answers"]))
    answer = response["answer"] if response["answer"] is not None else "no answer"
    head = (
        f"reward {response['reward']:g}, advantage {response['advantage']:+.2f}, ended by {response['stop']}; "
        f"answered: {answer}; accepted: {golden}"
    )
    spans = "".join(_span(span, response) for span in response["spans"])
    return (
        f'<div class="response"><strong>{escape(response["question"])}</strong>'
        f'<div class="dim">{escape(head)}</div><div class="tokens">{spans}</div></div>'
    )


def _span(span: Mapping[str, Any], response: Mapping[str, Any]) -> str:
    if "displacement" not in span:
        return f'<span class="fed">{escape(span["text"].strip())}</span>'
    places = range(span["start"], span["end"])
    tokens = "".join(
        _token(response["tokens"][at], response["old_logprobs"][at], response["logprobs"][at])
        for at in places
    )
    held = ", held by LLDS" if span["gate_open"] else ""
    return f'{tokens} <span class="dim">[{escape(span["kind"])} {span["displacement"]:+.3f}{held}]</span>\n'


def _token(text: str, old: Any, new: Any) -> str:
    # What is not finite stands in the record as text.
    if not isinstance(old, int | float) or not isinstance(new, int | float):
        return f'<b class="lost4" title="{escape(old)} → {escape(new)}">{escape(text)}</b>'
    lost = old - new
    level = sum(abs(lost) >= bound for bound in _BOUNDS)
    if not level:
        return escape(text)
    kind = "lost" if lost > 0 else "won"
    return f'<b class="{kind}{level}" title="{old:.2f} → {new:.2f}">{escape(text)}</b>'
