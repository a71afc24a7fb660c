"""The rollout function in a real ``GRPOTrainer``."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from llds.errors import LLDSError
from llds.search.episode import EpisodeRunner, Limits
from llds.search.protocol import Protocol
from llds.search.retrieval import BM25Retriever, RetrieverUnavailable
from llds.search.rewards import exact_match
from llds.search.sampling import Sampling
from llds.search.trl_rollout import rollout_columns, trl_rollout_func
from search_models import favour, make_qwen, make_tokenizer

CORPUS = [{"id": str(i), "contents": f'"Town {i}"\nTown {i} is a town.'} for i in range(9)]
TEMPERATURE = 0.8


class Watching(GRPOTrainer):
    """Keeps what the first loss was computed from."""

    first = None

    def _compute_loss(self, model, inputs):
        if self.first is None:
            self.first = dict(inputs)
        return super()._compute_loss(model, inputs)


def make_runner():
    tokenizer = make_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    model = make_qwen(tokenizer)
    favour(model, {token("<search>"): 6, token("</search>"): 6, token("<answer>"): 5, token("</answer>"): 5})
    limits = Limits(2, 16, 60, 300, 100)
    return EpisodeRunner(
        model, tokenizer, BM25Retriever(CORPUS), Protocol("short", topk=1), limits, Sampling(TEMPERATURE)
    )


def train(tmp_path, runner, rollout, reward, **columns):
    questions = [runner.protocol.prompt(f"where is Town {i}") for i in range(4)]
    rows = {"prompt": questions, "golden_answers": [["x"], ["y"], ["z"], ["a"]], **columns}
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        max_steps=2,
        learning_rate=1e-3,
        temperature=TEMPERATURE,
        max_completion_length=300,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Watching(
        model=runner.model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=runner.tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    return trainer


def test_two_steps_of_grpo(tmp_path):
    runner = make_runner()
    before = [parameter.clone() for parameter in runner.model.parameters()]
    kept, seen = [], []

    def reward(completions, golden_answers, answer, searches, tool_failed, stop, turns, response, **others):
        seen.append((answer, stop, response))
        assert len(answer) == len(golden_answers) == len(searches) == len(turns) == len(tool_failed)
        return [
            exact_match(a, g) + 0.1 * s + 0.01 * len(r)
            for a, g, s, r in zip(answer, golden_answers, searches, response, strict=True)
        ]

    generator = torch.Generator().manual_seed(0)
    rollout = trl_rollout_func(runner, generator=generator, on_episodes=kept.extend)
    trainer = train(tmp_path, runner, rollout, reward)
    assert trainer.state.global_step == 2
    assert [episode.answer for episode in kept] == [a for answers, _, _ in seen for a in answers]
    assert any(not p.equal(q) for p, q in zip(before, runner.model.parameters(), strict=True))
    assert runner.model.training

    batch = trainer.first
    by_ids = {tuple(episode.response_ids): episode for episode in kept}
    for row in range(len(batch["completion_ids"])):
        length = int(batch["completion_mask"][row].sum())
        episode = by_ids[tuple(batch["completion_ids"][row, :length].tolist())]
        assert batch["tool_mask"][row, :length].tolist() == episode.response_mask
        mask = torch.tensor(episode.response_mask, dtype=torch.bool)
        torch.testing.assert_close(
            batch["old_per_token_logps"][row, :length][mask],
            torch.tensor(episode.logprobs)[mask],
            atol=1e-4,
            rtol=0,
        )


def test_columns_of_a_failed_and_of_an_answered_episode():
    class Closed:
        def search(self, queries, topk):
            raise RetrieverUnavailable("closed")

    runner = make_runner()
    runner.retriever = Closed()
    episodes = runner.run(["where is Town 1"] * 20, generator=torch.Generator().manual_seed(1))
    columns = rollout_columns(episodes)
    assert {"answer", "tool_failed"} <= set(columns["stop"])
    for row, episode in enumerate(episodes):
        assert columns["tool_failed"][row] == (columns["stop"][row] == "tool_failed")
        assert len(columns["completion_ids"][row]) == len(columns["env_mask"][row]) > 0
        assert (
            len(columns["logprobs"][row]) == len(columns["answer_mask"][row]) == len(columns["env_mask"][row])
        )
        assert sum(columns["answer_mask"][row]) > 0 or episode.answer is None
        assert all(
            m <= own for m, own in zip(columns["answer_mask"][row], columns["env_mask"][row], strict=True)
        )


def test_a_column_that_the_rollout_would_overwrite(tmp_path):
    runner = make_runner()
    with pytest.raises(LLDSError, match="column 'answer'"):
        train(
            tmp_path, runner, trl_rollout_func(runner), lambda completions, **others: [0.0], answer=["x"] * 4
        )


def test_spread_parameters_are_refused():
    class Accelerator:
        state = None

    class Trainer:
        is_fsdp_enabled = True
        accelerator = Accelerator()

    with pytest.raises(LLDSError, match="DDP or ZeRO-2"):
        trl_rollout_func(make_runner())(["x"], Trainer())
