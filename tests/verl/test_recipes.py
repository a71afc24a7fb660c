"""Every recipe and arm of the paper, composed and validated by verl's own code."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from llds.engines.verl.searching import SearchOptions
from llds.training.inputs import make_limits, make_protocol
from llds.training.recipe import load_recipe, recipe_names
from llds.training.verl_command import Files, mini_batch, verl_overrides

GSPO = ["grpo.importance=sequence", "grpo.loss=grpo", "grpo.clip_low=3e-4", "grpo.clip_high=4e-4"]
ARMS = {
    "grpo": ["llds.coef=0"],
    "grpo+llds": [],
    "grpo+llds-ma": ["llds.mask_answer=true"],
    "gspo": [*GSPO, "llds.coef=0"],
    "gspo+llds": GSPO,
}
RECIPES = [name for name in recipe_names() if load_recipe(name).run.engine == "verl"]


def composed(recipe):
    files = Files(recipe.model.path, *(Path(f"/a folder/{name}") for name in ("a.parquet", "b.parquet", "c")))
    words = verl_overrides(recipe, files)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", words)


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", RECIPES)
def test_verl_accepts_every_recipe_and_arm(name, arm, nodes):
    recipe = load_recipe(name, [*ARMS[arm], f"scale.nodes={nodes}"])
    config = composed(recipe)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert config.data.train_files == "/a folder/a.parquet"
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 8 * nodes
    assert need_reference_policy(config)
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert type(loss).__name__ == "LLDSPolicyLossConfig"
    assert loss.loss_mode == "llds"
    assert loss.llds_coef == recipe.llds.coef
    assert loss.llds_base == ("gspo" if arm.startswith("gspo") else "vanilla")
    options = SearchOptions.of(OmegaConf.to_container(config.llds_search))
    assert options.limits(1024, 3500) == make_limits(recipe)
    assert options.protocol() == make_protocol(recipe)
    assert (options.url, options.tries) == (recipe.retrieval.url, recipe.retrieval.tries)
    assert loss.llds_answer_weight == ("auto" if arm.endswith("ma") else None)


@pytest.mark.parametrize(
    "override",
    ["grpo.loss=dapo", "grpo.loss=grpo", "grpo.loss=dr_grpo", "grpo.loss=cispo", "grpo.loss=sapo",
     "llds.baseline=reference", "llds.penalty=huber", "llds.gate=token", "llds.normalizer=response",
     "scale.generator=sglang", "scale.tokens_per_gpu=0", "model.dtype=float32", "scale.offload=true"],
)  # fmt: skip
def test_verl_accepts_every_setting_that_is_not_refused(override):
    config = composed(load_recipe("qwen2.5-3b", [override]))
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert "???" not in OmegaConf.to_yaml(config.actor_rollout_ref.actor.policy_loss)


def test_the_tiny_recipe_too():
    recipe = load_recipe("tiny", ["engine=verl", "model.device=cuda", "scale.gpus=2"])
    config = composed(recipe)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == mini_batch(recipe) == 4
    assert not need_reference_policy(config)
