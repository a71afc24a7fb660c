"""What an arm minimises: each against its equation, token by token, and one step against TRL's."""

from dataclasses import replace

import pytest
import torch

import trl_toy as toy
from llds.engines.trl import LLDSGRPOConfig, LLDSGRPOTrainer
from llds.errors import LLDSError
from llds.lab.arms import ARMS, Arm, arm_named
from llds.lab.update import Batch, losses, shared_prefix


def batch(seed=0, rows=6, length=12):
    """Two or three actions a row, the last an answer, padding behind; advantages of all signs."""
    g = torch.Generator().manual_seed(seed)
    mask, answer = torch.zeros(rows, length), torch.zeros(rows, length)
    for row in range(rows):
        mask[row, :3] = mask[row, 5:8] = 1
        answer[row, 6:8] = 1
        if row % 2:
            mask[row, 9:11] = answer[row, 9:11] = 1
            answer[row, 6:8] = 0
    old = -torch.rand(rows, length, generator=g, dtype=torch.float64) * 2
    return Batch(
        ids=torch.zeros(rows, length + 5, dtype=torch.long),
        mask=mask,
        answer_mask=answer,
        advantages=torch.tensor([1.2, -0.7, 0.0, 0.4, -1.1, 0.0][:rows], dtype=torch.float64),
        credit=torch.ones(rows, length, dtype=torch.float64),
        old_logprobs=old,
        ref_logprobs=old + torch.randn(rows, length, generator=g, dtype=torch.float64) * 0.2,
        first_search=torch.full((rows,), -1),
        answer_weight=torch.tensor(0.4, dtype=torch.float64),
    )


def moved(data, seed=1, size=0.3):
    g = torch.Generator().manual_seed(seed)
    return (data.old_logprobs + size * torch.randn(data.mask.shape, generator=g).double()).requires_grad_()


def actions_of(mask):
    spans, start = [], None
    for i, bit in enumerate([*mask, 0]):
        if bit and start is None:
            start = i
        if not bit and start is not None:
            spans.append(range(start, i))
            start = None
    return spans


def by_hand(arm, data, logprobs, entropies, held=None):
    """The loss of an arm, written out as in the papers, one token at a time."""
    old, reference = data.old_logprobs, data.ref_logprobs
    held = old if held is None else held
    rows = range(len(data.mask))
    written = [[i for i, bit in enumerate(data.mask[row].tolist()) if bit] for row in rows]
    tokens = sum(map(len, written))
    policy, kl, entropy, penalty, preserved = 0.0, 0.0, 0.0, 0.0, 0
    for row in rows:
        advantage = data.advantages[row].item()
        mean = sum((logprobs[row, i] - old[row, i]) for i in written[row]) / len(written[row])
        for i in written[row]:
            if arm.policy == "gspo":
                ratio, low, high = mean.exp(), 3e-4, 4e-4
                share = 1 / len(written[row]) / len(rows)
            else:
                ratio, low, high = (logprobs[row, i] - old[row, i]).exp(), 0.2, arm.clip_high or 0.2
                share = 1 / tokens
            a = advantage * data.credit[row, i].item()
            policy = policy - share * torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            gap = reference[row, i] - logprobs[row, i]
            if arm.kl_on == "all" or (arm.kl_on == "wrong") == (advantage < -1e-3):
                kl = kl + share * (gap.exp() - gap - 1)
            entropy = entropy + entropies[row, i] / tokens
        if advantage < -1e-3 or (arm.preserve == "positive" and advantage <= 1e-3):
            continue
        preserved += len(written[row])
        drop = held[row] - logprobs[row] - arm.dead_zone
        whole = sum(drop[i].item() for i in written[row])
        for span in actions_of(data.mask[row].tolist()):
            summed = sum(drop[i].item() for i in span)
            if not {"action": summed > 0, "response": whole > 0, "token": True}[arm.gate]:
                continue
            for i in span:
                lost = drop[i].clamp(min=0)
                if arm.penalty == "huber":
                    width = arm.huber_width
                    lost = lost**2 / (2 * width) if lost.item() < width else lost - width / 2
                is_answer = arm.answer_searches is not None and data.answer_mask[row, i] == 1
                penalty = penalty + lost * (data.answer_weight if is_answer else 1.0)
    count = {"all": tokens, "preserved": preserved}[arm.normalizer]
    return policy + arm.kl * kl + arm.coef * penalty / count - arm.entropy * entropy


def held_by(arm, data):
    return {"old": None, "anchor": data.old_logprobs + 0.1, "ref": data.ref_logprobs}[arm.baseline]


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("seed", range(3))
def test_every_arm_is_its_equation(name, seed):
    arm, data = ARMS[name], batch(seed)
    if arm.spare_prefix or arm.spare_wrong:
        data.credit[1, :3] = 0
    size = 0.002 if arm.policy == "gspo" else 0.3
    theta = moved(data, seed + 10, size)
    entropies = theta.square()
    held = held_by(arm, data)
    made = losses(arm, data, theta, entropies, held_logprobs=held)
    (gradient,) = torch.autograd.grad(made.total, theta)
    again = theta.detach().clone().requires_grad_()
    wanted = by_hand(arm, data, again, again.square(), held)
    (wanted_gradient,) = torch.autograd.grad(wanted, again)
    torch.testing.assert_close(made.total, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-9)


def test_no_arm_is_another_by_mistake():
    seen = {}
    for name, arm in ARMS.items():
        if arm.lr_factor != 1 or arm.control or arm.spare_prefix or arm.spare_wrong:
            continue
        totals = []
        for seed in range(6):
            data = batch(seed)
            theta = moved(data, seed)
            made = losses(arm, data, theta, theta.square(), held_logprobs=held_by(arm, data))
            totals.append(made.total.item())
        seen[name] = tuple(round(total, 9) for total in totals)
    assert len(set(seen.values())) == len(seen)
    for name in ("half-lr", "llds-control", "spare-prefix", "spare-wrong"):
        assert ARMS[name].settings() != ARMS["grpo"].settings()


def test_settings_tell_what_differs():
    assert ARMS["grpo"].settings() == {}
    assert ARMS["llds+kl100"].settings() == {"kl": 0.1, "coef": 0.2}
    with pytest.raises(LLDSError, match="no arm 'grop'"):
        arm_named("grop")
    with pytest.raises(LLDSError, match="policy must be one of"):
        Arm(policy="ppo")


def test_rows_are_cut_after_the_last_token_written():
    data = batch()
    cut = data.rows(torch.tensor([2, 0]))
    assert cut.mask.shape == (2, 8)
    assert cut.ids.shape == (2, 13)
    assert torch.equal(cut.old_logprobs, data.old_logprobs[[2, 0], :8])
    assert cut.advantages.tolist() == [0.0, 1.2]


def test_shared_prefix():
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 3, 9], [7, 7, 7, 7], [7, 7, 7, 8], [7, 1, 1, 1]])
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    shared = shared_prefix(ids, rewards, 3)
    assert shared.int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], *[[0, 0, 0, 0]] * 3]


TRL = {
    "llds": {"llds_coef": 0.2},
    "kl100": {"llds_coef": 0.0, "beta": 0.1},
    "llds+kl1000": {"beta": 1.0},
    "llds-token": {"llds_gate": "token"},
    "llds-response": {"llds_gate": "response"},
    "llds-positive": {"llds_preserve": "positive"},
    "llds-preserved-0.5": {"llds_normalizer": "preserved", "llds_coef": 0.5},
    "llds-dead-zone": {"llds_dead_zone": 0.01},
    "llds-huber": {"llds_penalty": "huber"},
    "llds-ma": {"llds_answer_weight": "auto"},
    "clip-higher": {"llds_coef": 0.0, "epsilon_high": 0.28},
    "gspo+llds": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
}


def toy_logprobs(model, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits
    width = inputs["completion_ids"].size(1)
    return logits[:, -width - 1 : -1].log_softmax(-1).gather(2, ids[:, -width:, None]).squeeze(2)


def as_batch(inputs):
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    ones = torch.ones(mask.shape)
    return Batch(
        ids=inputs["completion_ids"],
        mask=mask,
        answer_mask=inputs.get("llds_answer_mask", mask * 0),
        advantages=inputs["advantages"],
        credit=ones,
        old_logprobs=inputs["old_per_token_logps"],
        ref_logprobs=inputs["ref_per_token_logps"],
        first_search=torch.full((len(mask),), -1),
        answer_weight=torch.as_tensor(inputs.get("llds_answer_weight", 1.0)),
    )


@pytest.mark.parametrize("name", TRL)
def test_one_step_is_that_of_trl(tmp_path, name):
    """Loss, gradient and the weights after AdamW's step, on a rollout that TRL itself prepared."""
    arm = ARMS[name]
    schedule = {"max_steps": 1, "num_iterations": 2, "learning_rate": 1e-4}
    # The paper's KL is that of verl: no factor for importance.
    common = {"beta": 1e-3, "loss_type": "bnpo", "use_bias_correction_kl": False}
    options = schedule | common | TRL[name]
    # TRL loads the reference policy anew from where the model came from.
    policy = toy.model()
    policy.save_pretrained(tmp_path / "start")
    policy.config._name_or_path = str(tmp_path / "start")
    config = LLDSGRPOConfig(**toy.settings(tmp_path, **options))
    trainer = toy.trainer(LLDSGRPOTrainer, config, policy=policy)
    trainer.train()
    inputs = trainer._buffered_inputs[0]
    ours = toy.model()
    generator = torch.Generator().manual_seed(1)
    size = 1e-3 if arm.policy == "gspo" else 5e-3
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1 + 4 * size).add_(torch.randn(p.shape, generator=generator), alpha=size)
    ours.load_state_dict(trainer.model.state_dict())
    # Rounding in float32 is as large as the bound where gradients cancel, as they do with GSPO.
    ours.double()
    trainer.model.double().train()

    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    data = as_batch(inputs)
    logprobs = toy_logprobs(ours, inputs)
    made = losses(arm, data, logprobs, logprobs)
    made.total.backward()

    if arm.coef:
        assert made.llds.loss > 1e-6
    torch.testing.assert_close(made.total, theirs, rtol=1e-5, atol=1e-5, check_dtype=False)
    for key, p in trainer.model.named_parameters():
        torch.testing.assert_close(ours.get_parameter(key).grad, p.grad, rtol=1e-5, atol=1e-5)
    for model in (ours, trainer.model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A large epsilon: else Adam makes a full step of the rounding error of a gradient of nothing.
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.01).step()
    for key, p in trainer.model.named_parameters():
        torch.testing.assert_close(ours.get_parameter(key), p, rtol=0, atol=1e-5)


def test_the_old_policy_gives_no_penalty_and_the_gradient_of_plain_grpo():
    data = batch()
    theta = data.old_logprobs.clone().requires_grad_()
    with_term = losses(replace(ARMS["llds"], coef=5.0), data, theta, theta)
    assert with_term.llds.loss == 0
    (gradient,) = torch.autograd.grad(with_term.total, theta)
    (plain,) = torch.autograd.grad(losses(ARMS["grpo"], data, theta, theta).total, theta)
    assert torch.equal(gradient, plain)
