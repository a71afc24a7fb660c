"""Checkpoints: bit for bit, no pickle, never half of one."""

import json

import pytest
import torch

from llds.errors import LLDSError
from llds.files import atomic_folder
from llds.training.checkpoints import (
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    load_optimizer,
    save_optimizer,
)


def make_training(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return model, optimizer, schedule


def train(model, optimizer, schedule, steps, start=0):
    for step in range(start, start + steps):
        inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        schedule.step()


def test_training_goes_on_bit_for_bit(tmp_path):
    straight = make_training()
    train(*straight, steps=6)

    first = make_training()
    train(*first, steps=3)
    save_optimizer(first[1], first[2], tmp_path)
    resumed = make_training(seed=1)
    resumed[0].load_state_dict(first[0].state_dict())
    load_optimizer(resumed[1], resumed[2], tmp_path)
    train(*resumed, steps=3, start=3)

    for left, right in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(left, right)
    assert straight[2].get_last_lr() == resumed[2].get_last_lr()


def test_without_the_optimizer_state_training_goes_on_differently(tmp_path):
    # So the test above can fail: the state matters.
    straight, fresh = make_training(), make_training()
    train(*straight, steps=6)
    train(*fresh, steps=3)
    restarted = make_training(seed=1)
    restarted[0].load_state_dict(fresh[0].state_dict())
    train(*restarted, steps=3, start=3)
    pairs = zip(straight[0].parameters(), restarted[0].parameters(), strict=True)
    assert not all(torch.equal(left, right) for left, right in pairs)


def test_files_are_safetensors_and_json(tmp_path):
    training = make_training()
    train(*training, steps=1)
    save_optimizer(training[1], training[2], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer.json", "optimizer.safetensors"]
    assert json.loads((tmp_path / "optimizer.json").read_text())["groups"][0]["weight_decay"] == 0.1


def test_a_missing_or_foreign_state_is_one_sentence(tmp_path):
    training = make_training()
    with pytest.raises(LLDSError, match="can't be read"):
        load_optimizer(training[1], training[2], tmp_path)
    train(*training, steps=1)
    save_optimizer(training[1], training[2], tmp_path)
    other = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(LLDSError, match="does not fit this model"):
        load_optimizer(other, training[2], tmp_path)
    (tmp_path / "optimizer.json").write_text("{")
    with pytest.raises(LLDSError, match="can't be read"):
        load_optimizer(training[1], training[2], tmp_path)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "step-000004"
    with pytest.raises(OSError, match="No such file"), atomic_folder(target) as folder:
        (folder / "absent").read_text()
    assert list(tmp_path.iterdir()) == []
    for content in ("old", "new"):
        with atomic_folder(target) as folder:
            (folder / "file").write_text(content)
            assert not (target / "file").exists() or (target / "file").read_text() == "old"
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_what_a_crash_left_behind_is_not_a_checkpoint(tmp_path):
    for step in (12, 4, 100):
        checkpoint_path(tmp_path, step).mkdir()
    (tmp_path / ".step-000200.tmp").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [4, 12, 100]
    assert list_checkpoints(tmp_path / "absent") == []
