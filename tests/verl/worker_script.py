"""Run verl's own TrainingWorker on the processor, with LLDS chosen by configuration; prints one JSON line.

``python worker_script.py CASE...`` in the environment of one rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
Each case trains the shipped tiny model, from the same weights, on the same rollout.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

os.environ |= {"VERL_PLATFORM": "cpu", "TOKENIZERS_PARALLELISM": "false", "LOCAL_RANK": "0"}

import cpu_platform
import torch
from hydra import compose, initialize_config_module
from tensordict import NonTensorStack, TensorDict
from transformers import AutoTokenizer
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from llds.objective import llds_loss
from llds.training.tiny import tiny_folder

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOSS = "actor_rollout_ref.actor.policy_loss"
ROWS, PROMPT, RESPONSE = 8, 24, 64
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 0.0, 1.0, -1.0, 0.25]
TOWNS = ["Aroth", "Bimm", "Corr", "Delph", "Enna", "Fex", "Gull", "Hove"]

#: Case -> hydra words, questions per mini-batch, passes. Two responses to a question.
CASES = {
    "vanilla": ([], 2, 1),
    "coef-0": (["+llds@_global_=default", f"{LOSS}.llds_coef=0"], 2, 1),
    "one-step": (["+llds@_global_=default", "data.train_batch_size=4"], 4, 1),
    "vanilla-one-step": ([], 4, 1),
    "two-steps": (["+llds@_global_=default"], 2, 1),
    "two-passes": (["+llds@_global_=default"], 4, 2),
    "gspo": (["+llds@_global_=gspo"], 2, 1),
    "ma": (["+llds@_global_=ma", f"{LOSS}.llds_answer_searches=4"], 2, 1),
    "reference": (
        [
            "+llds@_global_=default",
            f"{LOSS}.llds_baseline=reference",
            "actor_rollout_ref.actor.use_kl_loss=True",
        ],
        4,
        1,
    ),
}

#: What the base loss was called with, one entry per micro-batch.
SEEN = []


@register_policy_loss("recorded")
def recorded(**call):
    SEEN.append(
        {name: call[name].detach() for name in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    )
    return compute_policy_loss_vanilla(**call)


def build(words, mini_batch, passes):
    with initialize_config_module("verl.trainer.config", version_base=None):
        actor = "actor_rollout_ref.actor"
        overrides = [
            "hydra.searchpath=[pkg://llds.engines.verl.conf]",
            f"actor_rollout_ref.model.path={tiny_folder()}",
            "actor_rollout_ref.model.use_remove_padding=False",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            f"{actor}.strategy=fsdp2",
            f"{actor}.fsdp_config.use_torch_compile=False",
            f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
            f"{actor}.ppo_micro_batch_size_per_gpu=2",
            f"{actor}.ppo_mini_batch_size={mini_batch}",
            f"{actor}.ppo_epochs={passes}",
            f"{actor}.optim.lr=1e-3",
            f"{actor}.optim.total_training_steps=10",
            "actor_rollout_ref.rollout.n=2",
            "data.train_batch_size=4",
            *words,
        ]
        config = compose("ppo_trainer", overrides=overrides)
    # As verl's trainer does before it hands a part of it to the workers.
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    wanted = TrainingWorkerConfig(
        model_type="language_model",
        model_config=actor.model_config,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
        profiler_config=None,
    )
    engine = wanted.engine_config
    engine.use_dynamic_bsz = False
    engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = 2
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = 4096
    worker = TrainingWorker(wanted)
    worker.reset()
    # The name is looked up now, as verl's actor worker does: LLDS may have put a wrapper there.
    from verl.workers.utils import losses

    worker.set_loss_fn(partial(losses.ppo_loss, config=actor))
    return worker, actor


def rollout():
    """Return eight trajectories of one or two searches as verl's trainer has them, this rank's part."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    ids = torch.full((ROWS, PROMPT + RESPONSE), tokenizer.pad_token_id)
    seen, mask, extra = torch.zeros_like(ids), torch.zeros(ROWS, RESPONSE, dtype=torch.long), []
    for row, town in enumerate(TOWNS):
        prompt = tokenizer.encode(f"Question: What is the currency of {town}?\n")[-PROMPT:]
        searches = 1 + row % 2
        parts = [(f" <search> {town} </search>", 1), (f" <information> {town} is a town. </information>", 0)]
        parts = [*parts * searches, (" <answer> the", 1), (" florin", 2), (" </answer>", 1)]
        response, own, span = [], [], None
        for text, kind in parts:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            span = (len(response), len(response) + len(tokens)) if kind == 2 else span
            response += tokens
            own += [min(kind, 1)] * len(tokens)
        assert len(response) <= RESPONSE
        ids[row, PROMPT - len(prompt) : PROMPT] = torch.tensor(prompt)
        ids[row, PROMPT : PROMPT + len(response)] = torch.tensor(response)
        seen[row, PROMPT - len(prompt) : PROMPT + len(response)] = 1
        mask[row, : len(own)] = torch.tensor(own)
        extra.append({"llds_answer_span": span if row else None, "llds_valid_searches": searches})
    # The same mini-batches whatever the number of ranks.
    per_rank = ROWS // WORLD
    half = per_rank // 2
    mine = [*range(RANK * half, RANK * half + half), *range(4 + RANK * half, 4 + RANK * half + half)]
    data = TensorDict(
        {
            "input_ids": ids[mine],
            "attention_mask": seen[mine],
            "position_ids": (seen.cumsum(-1) - 1).clamp(min=0)[mine],
            "prompts": ids[mine, :PROMPT],
            "responses": ids[mine, PROMPT:],
            "response_mask": mask[mine],
            "advantages": (torch.tensor(ADVANTAGES)[:, None] * mask)[mine],
        },
        batch_size=[per_rank],
    )
    data["extra_fields"] = NonTensorStack(*[extra[row] for row in mine])
    return left_right_2_no_padding(data)


def train(worker, mini_batch, passes):
    """Do what verl's trainer does with a rollout: old log-probs, then the optimizer steps."""
    data = rollout()
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=True,
        compute_loss=False,
        global_token_num=data["input_ids"].offsets().diff().tolist(),
    )
    output = worker.infer_batch(data.copy())
    data["old_log_probs"] = no_padding_2_padding(tu.get(output, "log_probs"), data).float()
    # A reference that every token is a little more likely under.
    data["ref_log_prob"] = data["old_log_probs"] + 0.01
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        global_batch_size=2 * mini_batch,
        mini_batch_size=2 * mini_batch,
        epochs=passes,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    return tu.get(worker.train_mini_batch(data), "metrics")


def objective(case, steps):
    """Return the term on what the base loss was called with, one value per optimizer step, for this rank."""
    per_step = len(SEEN) // steps
    values = []
    for step in range(steps):
        calls = SEEN[step * per_step : (step + 1) * per_step]
        batch = {name: torch.cat([call[name] for call in calls]) for name in calls[0]}
        output = llds_loss(
            batch["log_prob"],
            batch["old_log_prob"],
            batch["advantages"],
            batch["response_mask"],
            coef=0.2,
        )
        values.append(float(output.loss))
    return values


def run(case):
    words, mini_batch, passes = CASES[case]
    is_recorded = case in ("two-steps", "two-passes")
    words = [*words, f"{LOSS}.llds_base=recorded"] if is_recorded else words
    SEEN.clear()
    torch.manual_seed(0)
    worker, actor = build(words, mini_batch, passes)
    metrics = train(worker, mini_batch, passes)
    weights = [parameter.detach().full_tensor().flatten() for parameter in worker.engine.module.parameters()]
    told = {
        name: [float(one) for one in value] if isinstance(value, list) else value
        for name, value in metrics.items()
        if name.startswith(("llds/", "actor/", "grad_norm"))
    }
    return {
        "metrics": told,
        "weights": [float(torch.cat(weights).double().sum()), float(torch.cat(weights).double().norm())],
        "objective": objective(case, passes * 4 // mini_batch) if is_recorded else None,
        "config": type(actor.policy_loss).__name__,
    }


def main():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=RANK, world_size=WORLD)
    cpu_platform.register_engine()
    found = {case: run(case) for case in sys.argv[1:]}
    if RANK == 0:
        print("RESULT " + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
