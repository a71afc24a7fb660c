"""The one-update probe of a run: fresh responses to a fixed set of questions, one update, undone again.

After Eq. 3 and Fig. 3a of arXiv 2512.04220. The set is chosen at the first probe, among questions whose
responses are partly right and partly wrong, and kept with the run. Every process does the same work, so
nothing has to be agreed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llds.data.questions import Question
from llds.dynamics import hidden_similarity, mean_hidden, probe_update
from llds.errors import LLDSError
from llds.files import atomic_write_text
from llds.objective import grpo_advantages, grpo_policy_loss
from llds.search.episode import Episode, EpisodeRunner
from llds.training.plan import seed_of
from llds.training.recipe import Recipe
from llds.training.rollout import reward_of

# Questions that are tried for each one that the set needs.
_TRIED = 4
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ProbeBatch:
    """Responses to probe with: ``ids``, ``attention``, ``mask`` [R, T] (mask: the policy's tokens),
    ``advantages`` [R] and the number of ``groups`` that are partly right.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor
    advantages: Tensor
    groups: int

    @property
    def correct(self) -> Tensor:
        """Which responses are correct, bool [R]."""
        return self.advantages > _TOLERANCE

    def parts(self, size: int) -> Iterator[ProbeBatch]:
        """Cut it into parts of ``size`` responses."""
        for start in range(0, len(self.ids), size):
            rows = slice(start, start + size)
            yield ProbeBatch(
                self.ids[rows], self.attention[rows], self.mask[rows], self.advantages[rows], self.groups
            )


class RunProbe:
    """Probes the policy of a run; call :meth:`measure` between optimizer steps.

    ``path``: where the ids of the fixed questions are kept. ``questions``: those of the training set.
    """

    def __init__(
        self, recipe: Recipe, runner: EpisodeRunner, questions: Sequence[Question], path: Path
    ) -> None:
        self._recipe = recipe
        self._runner = runner
        self._questions = questions
        self._path = path

    def is_due(self, rollout: int) -> bool:
        """Say whether to probe before the rollout with this index."""
        every = self._recipe.dynamics.probe_every
        return every > 0 and rollout % every == 0

    def measure(self, trainer: Any, rollout: int) -> dict[str, float]:
        """Return the series of the probe before the rollout with this index; none without a mixed group."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        seed = seed_of(self._recipe.run.seed, "probe", rollout)
        batch = self._batch(model, torch.Generator().manual_seed(seed))
        series: dict[str, float | None] = {"probe_groups": float(batch.groups)}
        if batch.groups:
            with trainer.accelerator.autocast():
                series |= probe_series(model, batch, trainer.optimizer, self._recipe)
        return {name: value for name, value in series.items() if value is not None}

    def _batch(self, model: Any, generator: torch.Generator) -> ProbeBatch:
        chosen = self._kept()
        if chosen is not None:
            return self._sampled(model, chosen, generator)[0]
        wanted = self._recipe.dynamics.probe_questions
        order = torch.randperm(len(self._questions), generator=generator).tolist()
        tried = [self._questions[index] for index in order[: _TRIED * wanted]]
        batch, mixed = self._sampled(model, tried, generator)
        chosen = [question for question, is_mixed in zip(tried, mixed, strict=True) if is_mixed][:wanted]
        if chosen:
            atomic_write_text(self._path, json.dumps({"questions": [one.id for one in chosen]}) + "\n")
            return self._sampled(model, chosen, generator)[0]
        return batch

    def _kept(self) -> list[Question] | None:
        """Return the questions of the set, if they were chosen before."""
        if not self._path.exists():
            return None
        known = {question.id: question for question in self._questions}
        try:
            return [known[name] for name in json.loads(self._path.read_text("utf-8"))["questions"]]
        except (ValueError, KeyError, TypeError) as error:
            raise LLDSError(
                f"{self._path} does not name questions of the training set ({error!r}); delete it, and the "
                "probe set is chosen anew."
            ) from None

    def _sampled(
        self, model: Any, questions: Sequence[Question], generator: torch.Generator
    ) -> tuple[ProbeBatch, list[bool]]:
        """Sample a group for each question; return them, and which groups are partly right."""
        size = self._recipe.grpo.responses
        asked = [question for question in questions for _ in range(size)]
        episodes = self._runner.for_model(model).run(
            [question.question for question in asked],
            generator=generator,
            batch_size=self._recipe.sampling.batch,
        )
        rewards = torch.tensor(
            [
                reward_of(one, question.golden_answers, self._recipe.reward)
                for one, question in zip(episodes, asked, strict=True)
            ]
        )
        valid = torch.tensor([not one.tool_failed for one in episodes])
        scale = "none" if self._recipe.grpo.scale_rewards == "none" else "std"
        advantages = grpo_advantages(rewards, size, scale=scale, valid=valid)
        mixed = (advantages.view(-1, size).abs() > _TOLERANCE).any(1)
        return make_batch(episodes, advantages, int(mixed.sum()), model.device), mixed.tolist()


def make_batch(
    episodes: Sequence[Episode], advantages: Tensor, groups: int, device: torch.device | str
) -> ProbeBatch:
    """Pad episodes on the right. ``advantages`` [R]; a failed episode keeps no token of the policy's."""
    width = max(len(one.prompt_ids) + len(one.response_ids) for one in episodes)
    ids, attention, mask = (torch.zeros(len(episodes), width, dtype=torch.long) for _ in range(3))
    for row, one in enumerate(episodes):
        start, end = len(one.prompt_ids), len(one.prompt_ids) + len(one.response_ids)
        ids[row, :end] = torch.tensor([*one.prompt_ids, *one.response_ids])
        attention[row, :end] = 1
        if not one.tool_failed:
            mask[row, start:end] = torch.tensor(one.response_mask)
    return ProbeBatch(ids.to(device), attention.to(device), mask.to(device), advantages.to(device), groups)


def probe_series(model: Any, batch: ProbeBatch, optimizer: Any, recipe: Recipe) -> dict[str, float | None]:
    """Make one GRPO update of ``batch`` on ``model``, undo it, and return the series by canonical name."""
    size, temperature = recipe.grpo.micro_batch, recipe.sampling.temperature
    tokens = batch.mask.sum()

    def loss() -> Tensor:
        total: Tensor | None = None
        for part in batch.parts(size):
            # All but the last part are done with at once, so that one graph is held at a time.
            if total is not None:
                total.backward()  # type: ignore[no-untyped-call]
            logprobs = token_logprobs(model, part, temperature)
            total = grpo_policy_loss(
                logprobs, logprobs.detach(), part.advantages, part.mask[:, 1:], token_count=tokens
            ).loss
        assert total is not None
        return total

    def likelihood() -> Tensor:
        sums = [
            (token_logprobs(model, part, temperature) * part.mask[:, 1:]).sum(1) for part in batch.parts(size)
        ]
        return torch.cat(sums)[batch.correct]

    result = probe_update(
        model,
        loss,
        likelihood,
        # Accelerate's wrapper may skip a step; the optimizer inside it does not.
        optimizer=getattr(optimizer, "optimizer", optimizer),
        max_grad_norm=recipe.grpo.max_grad_norm or None,
    )
    return {
        **result.series(recipe.dynamics.lld_epsilon),
        "hidden_similarity": _similarity(model, batch, size),
    }


def token_logprobs(model: Any, batch: ProbeBatch, temperature: float) -> Tensor:
    """Return the log-prob of each token after the first, [R, T − 1], nats, at this temperature."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(2, batch.ids[:, 1:].unsqueeze(2)).squeeze(2)


@torch.no_grad()
def _similarity(model: Any, batch: ProbeBatch, size: int) -> float | None:
    is_training = model.training
    model.eval()
    try:
        hidden = [
            mean_hidden(
                model(
                    input_ids=part.ids,
                    attention_mask=part.attention,
                    use_cache=False,
                    output_hidden_states=True,
                ).hidden_states[-1],
                part.mask,
            )
            for part in batch.parts(size)
        ]
    finally:
        model.train(is_training)
    value = hidden_similarity(torch.cat(hidden), batch.correct, batch.advantages < -_TOLERANCE).item()
    return value if value == value else None
