"""Recipes: every setting of a training run, with its default, unit and help.

Imports neither torch nor an engine, since ``llds train --help`` must be fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

from llds.errors import LLDSError
from llds.training.settings import (
    build,
    did_you_mean,
    flat_values,
    read_override,
    read_yaml,
    setting,
    show_value,
)


@dataclass(frozen=True)
class ModelSettings:
    """The policy."""

    path: str = setting("tiny", "tiny, smollm2, a Hugging Face model folder, or a model name on the Hub")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "number format of the arithmetic; weights stay float32"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "cpu", "where to train; auto takes a GPU when there is one"
    )
    gradient_checkpointing: bool = setting(
        False, "trade time for memory: recompute activations in the backward pass"
    )


@dataclass(frozen=True)
class WarmStartSettings:
    """Supervised training on protocol traces before reinforcement learning; kept in a cache."""

    steps: int = setting(0, "optimizer steps on traces; 0 starts from the model as it is", "steps", low=0)
    learning_rate: float = setting(1e-4, "peak learning rate of the warm start", low=0)
    batch: int = setting(4, "traces per optimizer step", "traces", low=1)
    stop_early: float = setting(
        0.3, "share of two-hop traces that stop after one search, for training to mend", low=0, high=1
    )


@dataclass(frozen=True)
class DataSettings:
    """Questions to train on and to hold out."""

    train: str = setting(
        "embedded", "training questions: embedded, or a JSONL file (id, question, golden_answers)"
    )
    test: str = setting("embedded", "held-out questions: embedded, or a JSONL file of the same form")


@dataclass(frozen=True)
class RetrievalSettings:
    """What the search tool looks in."""

    corpus: str = setting(
        "embedded",
        "passages to search in this process: embedded, a JSONL file (.gz, .zst too), or a folder of llds index",
    )
    mode: Literal["auto", "bm25", "dense", "hybrid"] = setting(
        "auto", "how an index folder is searched: auto is hybrid where it has vectors, else bm25"
    )
    url: str | None = setting(None, "use a retrieval server instead, e.g. http://host:8000/retrieve")
    token_file: str | None = setting(
        None, "file with the server's token, if it wants one; else $LLDS_RETRIEVAL_TOKEN is used"
    )
    topk: int = setting(3, "passages per search", "passages", low=1)
    timeout: float = setting(30.0, "give up on one try of a request after this long", "seconds", low=0.1)
    tries: int = setting(8, "tries of one request before its episodes are left out", "tries", low=1)
    deadline: float = setting(
        120.0, "give up on one search, with all its tries and pauses, after this long", "seconds", low=0.1
    )
    cache: int = setting(20_000, "answers of the server to keep, those used last", "queries", low=0)


@dataclass(frozen=True)
class EpisodeSettings:
    """The shape of one episode."""

    prompt: Literal["short", "search-r1", "search-r1-instruct"] = setting(
        "short", "wording of the prompt: short for small models; the others are Search-R1's"
    )
    max_turns: int = setting(
        4, "searches (or corrections) answered per episode; one last action may follow", "turns", low=0
    )
    max_prompt: int = setting(256, "longest prompt; a longer one is an error", "tokens", low=1)
    max_action: int = setting(64, "longest action: what the model writes in one turn", "tokens", low=1)
    max_observation: int = setting(192, "longest search result shown to the model", "tokens", low=1)
    max_response: int = setting(
        768, "longest response: all actions and observations together", "tokens", low=2
    )
    passage_words: int = setting(
        40, "words shown of each passage, cut round the query; 0 shows all", "words", low=0
    )
    correct_eos: bool = setting(
        True, "answer an action that ends without search or answer with a correction, as Search-R1 does"
    )


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn in training. Evaluation is greedy."""

    temperature: float = setting(1.0, "softmax temperature; log-probabilities use it too", low=1e-3)
    top_p: float = setting(1.0, "nucleus: smallest share of probability sampled from", low=1e-6, high=1.0)
    top_k: int = setting(0, "sample among this many most likely tokens; 0 among all", "tokens", low=0)
    batch: int = setting(128, "episodes generated side by side", "episodes", low=1)


@dataclass(frozen=True)
class RewardSettings:
    """The reward of one episode: a weighted sum."""

    exact_match: float = setting(1.0, "weight of exact match of the last answer, as Search-R1 scores it")
    f1: float = setting(0.0, "weight of the token F1 of the last answer")
    valid_format: float = setting(0.0, "weight of a well-formed episode (1 or 0)")


@dataclass(frozen=True)
class GRPOSettings:
    """The policy-gradient objective and its optimizer."""

    questions: int = setting(16, "questions per rollout, over all processes", "questions", low=1)
    responses: int = setting(8, "responses per question (the group)", "responses", low=2)
    steps_per_rollout: int = setting(
        4,
        "optimizer steps on each rollout; with 1, old and new policy are the same and LLDS cannot act",
        "steps",
        low=1,
    )
    passes: int = setting(1, "passes over each rollout", "passes", low=1)
    micro_batch: int = setting(32, "responses per forward pass and process", "responses", low=1)
    learning_rate: float = setting(1e-4, "peak learning rate (AdamW)", low=0)
    schedule: Literal["constant", "linear", "cosine"] = setting("constant", "learning rate after the warm-up")
    warmup: float = setting(
        0.0, "share of all optimizer steps in which the learning rate rises", low=0, high=1
    )
    weight_decay: float = setting(0.0, "AdamW weight decay", low=0)
    max_grad_norm: float = setting(1.0, "clip the gradient to this norm; 0 leaves it alone", low=0)
    loss: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = setting(
        "dapo", "TRL's loss type: how the policy loss is clipped and averaged"
    )
    importance: Literal["token", "sequence"] = setting(
        "token", "importance ratio per token, or per sequence (GSPO)"
    )
    clip_low: float = setting(0.2, "clip range below 1", low=0)
    clip_high: float | None = setting(None, "clip range above 1; the same as clip_low when not given", low=0)
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group", "divide advantages by the standard deviation of the group, of the batch, or not (Dr. GRPO)"
    )
    beta: float = setting(
        0.0, "weight of the KL to the starting policy; 0 keeps no reference model", "per nat", low=0
    )


@dataclass(frozen=True)
class LLDSSettings:
    """The LLDS regulariser."""

    coef: float = setting(0.2, "weight of the penalty; 0 is plain GRPO, with the LLDS metrics", low=0)
    warmup: int = setting(0, "optimizer steps over which the weight rises from 0", "steps", low=0)
    gate: Literal["action", "response", "token"] = setting(
        "action",
        "penalise where the likelihood fell of the whole action, the whole response, or the token alone",
    )
    normalizer: Literal["all", "preserved", "response"] = setting(
        "all",
        "divide by all action tokens (the authors' code), those of preserved responses (Eq. 4), or responses",
    )
    preserve: Literal["nonnegative", "positive"] = setting(
        "nonnegative", "which responses may not lose likelihood: advantage >= 0, or > 0"
    )
    mask_answer: bool = setting(
        False, "LLDS-MA: spare the answer span while the policy hardly searches (Eq. 5)"
    )
    answer_searches: float = setting(
        2.0,
        "with mask_answer: valid searches per response from which answers count in full",
        "searches",
        low=0.01,
    )
    baseline: Literal["old", "reference", "anchor"] = setting(
        "old",
        "policy that displacement is measured from: the sampling one, the starting one, or a lagged copy",
    )
    anchor_every: int = setting(8, "refresh the lagged copy after this many optimizer steps", "steps", low=1)
    dead_zone: float = setting(0.0, "drop per token to overlook as numerical noise", "nats", low=0)
    penalty: Literal["relu", "huber"] = setting(
        "relu", "shape of the penalty: full gradient however small the drop, or one that fades with it"
    )
    huber_width: float = setting(
        0.1, "with huber: the drop from which the gradient is full", "nats", low=1e-6
    )


@dataclass(frozen=True)
class DynamicsSettings:
    """What is watched while the run goes on, and what an alarm does."""

    on_alarm: Literal["warn", "stop", "rollback"] = setting(
        "warn",
        "when correct responses lose likelihood and a second sign agrees: tell of it, stop after the rollout, "
        "or go back to the last checkpoint before it began",
    )
    act_from: Literal["warning", "critical"] = setting(
        "critical", "stop or go back from this severity on; below it an alarm is only told"
    )
    coef_factor: float = setting(2.0, "at a rollback, multiply llds.coef by this", low=1)
    coef_start: float = setting(0.0, "at a rollback, what an llds.coef of 0 becomes", low=0)
    coef_limit: float = setting(2.0, "raise llds.coef no further than this", low=0.001)
    max_rollbacks: int = setting(2, "stop the run when it would go back more often", "rollbacks", low=0)
    lld_epsilon: float = setting(
        -0.01,
        "an action or response counts as displaced when its log-prob changed by this or less (Def. 4.1)",
        "nats",
    )
    probe_every: int = setting(
        0, "try one update on a fixed set of questions after this many rollouts; 0 never", "rollouts", low=0
    )
    probe_questions: int = setting(8, "questions of that set", "questions", low=1)


@dataclass(frozen=True)
class EvaluationSettings:
    """Scoring on held-out questions, greedy, before and after training."""

    split: Literal["test", "validation"] = setting("test", "which embedded questions are held out")
    questions: int = setting(
        200, "held-out questions, the same ones each time; 0 takes all", "questions", low=0
    )
    every: int = setting(
        0, "also evaluate after this many rollouts; 0 only before and after", "rollouts", low=0
    )
    without_retriever: bool = setting(
        True, "also evaluate with the search tool off, so memorised answers show"
    )
    batch: int = setting(64, "questions answered side by side", "questions", low=1)


@dataclass(frozen=True)
class ScaleSettings:
    """How a run lies over machines. Read by ``engine=verl`` alone; TRL is laid out by accelerate."""

    nodes: int = setting(1, "machines of the Ray cluster", "machines", low=1)
    gpus: int = setting(8, "GPUs of each machine", "GPUs", low=1)
    generator: Literal["vllm", "sglang"] = setting("vllm", "what writes the responses")
    tensor_parallel: int = setting(1, "GPUs that write together with one copy of the model", "GPUs", low=1)
    generator_memory: float = setting(
        0.5, "share of a GPU's memory for writing responses", low=0.05, high=0.95
    )
    tokens_per_gpu: int = setting(
        16384,
        "tokens per forward pass and GPU, packed; 0 takes grpo.micro_batch responses instead",
        "tokens",
        low=0,
    )
    offload: bool = setting(
        False, "keep weights, gradients and optimizer in main memory while responses are written"
    )
    agents: int = setting(8, "processes that play episodes, over all machines", "processes", low=1)


@dataclass(frozen=True)
class RunSettings:
    """The run as a whole."""

    engine: Literal["trl", "verl"] = setting(
        "trl", "what trains: TRL in this process, or verl on Ray; engine=verl is short for it"
    )
    name: str = setting("", "name of the run's folder; by default that of the recipe and the seed")
    folder: str = setting("runs", "where run folders go")
    seed: int = setting(
        0, "seed of question order, sampling and everything else random", low=0, high=2**32 - 1
    )
    rollouts: int = setting(40, "rollouts to train for", "rollouts", low=1, high=100_000)
    save_every: int = setting(
        5, "checkpoint after this many rollouts; 0 only when stopped", "rollouts", low=0
    )
    keep: int = setting(2, "checkpoints to keep", "checkpoints", low=1)
    trajectories: int = setting(4, "responses written out per optimizer step, to read; 0 writes none", low=0)
    threads: int = setting(0, "CPU threads; 0 leaves it to torch", "threads", low=0, high=1024)
    report_to: tuple[str, ...] = setting((), "also log to these, e.g. wandb,tensorboard,trackio")


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    data: DataSettings = field(default_factory=DataSettings)
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    episode: EpisodeSettings = field(default_factory=EpisodeSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    grpo: GRPOSettings = field(default_factory=GRPOSettings)
    llds: LLDSSettings = field(default_factory=LLDSSettings)
    dynamics: DynamicsSettings = field(default_factory=DynamicsSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    run: RunSettings = field(default_factory=RunSettings)


DEFAULT_RECIPE = "tiny"
# A model folder that a run wrote says in this file how its episodes go.
RECIPE_FILE = "llds.yaml"


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("llds") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def load_recipe(source: str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its name or from a YAML file, then apply ``key=value`` overrides.

    Raises :class:`LLDSError` for an unknown name or key, a value of the wrong type or out of range, and
    settings that do not fit together.
    """
    name = source or DEFAULT_RECIPE
    text, where = _recipe_text(name)
    values = read_yaml(Recipe, text, where)
    values.update(read_override(Recipe, _spelt_out(override)) for override in overrides)
    recipe = build(Recipe, values)
    if not recipe.run.name:
        run = dataclasses.replace(recipe.run, name=f"{_stem(name)}-seed{recipe.run.seed}")
        recipe = dataclasses.replace(recipe, run=run)
    _check_together(recipe)
    return recipe


def _stem(name: str) -> str:
    """Return the name of a recipe, or of its file without its ending; a point within stays."""
    path = Path(name)
    return path.stem if path.suffix.lower() in {".yaml", ".yml"} else path.name


def _spelt_out(override: str) -> str:
    return f"run.{override}" if override.startswith("engine=") else override


def read_recipe_file(path: Path) -> Recipe:
    """Read the resolved recipe of a run folder; raises :class:`LLDSError` as :func:`load_recipe` does."""
    return build(Recipe, read_yaml(Recipe, _read_text(path), str(path)))


# What may change when a run goes on, since none of it changes a number.
_FREE = frozenset(
    [f"run.{name}" for name in ("name", "folder", "report_to", "keep", "save_every", "trajectories")]
    + [f"retrieval.{name}" for name in ("token_file", "timeout", "tries", "deadline", "cache")]
    + [f"dynamics.{item.name}" for item in dataclasses.fields(DynamicsSettings) if item.name != "lld_epsilon"]
)


def first_difference(before: Recipe, now: Recipe) -> str | None:
    """Say what keeps a run by one recipe from going on by another; None when nothing does."""
    old, new = flat_values(before), flat_values(now)
    for key in old:
        if key not in _FREE and old[key] != new[key]:
            return f"{key} is {show_value(old[key])} there and {show_value(new[key])} here"
    return None


def _recipe_text(name: str) -> tuple[str, str]:
    known = recipe_names()
    if name in known:
        return (resources.files("llds") / "recipes" / f"{name}.yaml").read_text("utf-8"), f"recipe '{name}'"
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        return _read_text(path), str(path)
    near = (
        did_you_mean(name, known)
        or f"; the recipes are {', '.join(known)}, or give the path of a .yaml file."
    )
    raise LLDSError(f"There is no recipe '{name}'{near}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise LLDSError(f"There is no recipe file {path}; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LLDSError(f"The recipe file {path} can't be read: {error}.") from None


def _check_together(recipe: Recipe) -> None:
    grpo = recipe.grpo
    total = grpo.questions * grpo.responses
    if total % grpo.steps_per_rollout:
        raise LLDSError(
            f"grpo.questions × grpo.responses = {total} responses can't be split into "
            f"grpo.steps_per_rollout = {grpo.steps_per_rollout} equal parts; choose a divisor of {total}."
        )
    if recipe.dynamics.on_alarm == "rollback" and recipe.run.save_every == 0:
        raise LLDSError(
            "dynamics.on_alarm = rollback needs checkpoints to go back to; set run.save_every above 0."
        )
    if recipe.episode.max_observation >= recipe.episode.max_response:
        raise LLDSError(
            f"episode.max_observation = {recipe.episode.max_observation} leaves no room for actions in "
            f"episode.max_response = {recipe.episode.max_response} tokens; raise the latter."
        )
