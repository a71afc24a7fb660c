"""What one of two processes does in ``test_engine_trl_processes``: ``torchrun … trl_worker.py FOLDER``.

Rank 0 leaves ``weights.safetensors`` and ``records.json`` of a training run; every rank leaves
``told-RANK.json``, what stopped it in runs where only rank 1 has something wrong.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from trl import GRPOTrainer

import trl_toy as toy
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer, LLDSMixin
from llds.engines.trl.preflight import preflight

GENERATIONS = 8


def train(folder, per_device, **overrides):
    """Eight optimizer steps on one group of eight, which two processes share; two of its episodes failed."""
    options = {
        "num_generations": GENERATIONS,
        "per_device_train_batch_size": per_device,
        "num_iterations": 8,
        "max_steps": 8,
        "learning_rate": 0.2,
        "llds_coef": 1.0,
        "llds_answer_weight": "auto",
    } | overrides
    rollout = toy.Canned(failed=(1, 6), generations=GENERATIONS)
    trainer = toy.trainer(LLDSGRPOTrainer, LLDSGRPOConfig(**toy.settings(folder, **options)), rollout=rollout)
    records = []
    trainer.llds.step_hooks.append(records.append)
    trainer.train()
    return trainer, records


class BypassOnRankOne(GRPOTrainer):
    """Rank 1 computes its loss with a forward pass of its own."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.accelerator.process_index == 1:
            # Not through the wrapper of the model, whose forward pass is a collective of its own.
            ids, mask = inputs["completion_ids"], inputs["completion_mask"]
            self._get_per_token_logps_and_entropies(self.model, ids, mask, ids.size(1))
        return loss


class Unseen(LLDSMixin, BypassOnRankOne):
    pass


class GarbledOnRankOne(toy.Canned):
    def __call__(self, prompts, trainer):
        answer = super().__call__(prompts, trainer)
        if trainer.accelerator.process_index == 1:
            answer["answer_mask"] = [[1] for _ in prompts]
        return answer


def told(folder, cls, rollout):
    options = {"num_generations": GENERATIONS, "per_device_train_batch_size": 4, "llds_answer_weight": 0.5}
    config = LLDSGRPOConfig(**toy.settings(folder, **options))
    try:
        toy.trainer(cls, config, rollout=rollout).train()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main():
    folder = Path(sys.argv[1])
    trainer, records = train(folder, per_device=4)
    rank = trainer.accelerator.process_index
    if trainer.accelerator.num_processes != 2:
        raise SystemExit("two processes were expected")
    if rank == 0:
        save_file(toy.weights(trainer), folder / "weights.safetensors")
        (folder / "records.json").write_text(json.dumps([[r.metrics, r.sums] for r in records]))
    options = {"num_generations": GENERATIONS, "per_device_train_batch_size": 4}
    config = LLDSGRPOConfig(**toy.settings(folder, **options))
    report = preflight(toy.trainer(LLDSGRPOTrainer, config, rollout=toy.Canned(generations=GENERATIONS)))
    sentences = {
        "preflight": [finding.text for finding in report.findings],
        "unseen": told(folder, Unseen, toy.Canned(generations=GENERATIONS)),
        "garbled": told(folder, LLDSGRPOTrainer, GarbledOnRankOne(generations=GENERATIONS)),
    }
    (folder / f"told-{rank}.json").write_text(json.dumps(sentences))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
