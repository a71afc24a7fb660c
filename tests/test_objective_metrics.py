"""What the loss reports, and what may be done with it."""

import subprocess
import sys

import pytest
import torch

from llds import llds_loss
from llds.errors import LLDSError
from llds.objective import (
    NORMALIZERS,
    RATIOS,
    convert_coef,
    grpo_policy_loss,
    merge_metrics,
    normalizer_count,
)


def batch(seed=0, rows=6, length=30):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator, dtype=torch.float64)
    logprobs = old + 0.2 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    return logprobs.requires_grad_(), old, torch.tensor([1.0, -0.5, 0.0, 0.7, -1.2, 0.0][:rows]), mask


def test_likelihood_is_reported_by_the_sign_of_the_advantage():
    logprobs, old, advantages, mask = batch()
    metrics = llds_loss(logprobs, old, advantages, mask).metrics
    for sign, rows in {"positive": [0, 3], "zero": [2, 5], "negative": [1, 4]}.items():
        chosen = mask[rows]
        drop = (old - logprobs)[rows][chosen]
        assert metrics[f"tokens_{sign}"] == chosen.sum()
        assert metrics[f"responses_{sign}"] == 2
        torch.testing.assert_close(metrics[f"displacement_{sign}"], drop.mean().detach())
        torch.testing.assert_close(metrics[f"logprob_{sign}"], logprobs[rows][chosen].mean().detach())
    assert metrics["moved_tokens"] == metrics["tokens"] == mask.sum()
    torch.testing.assert_close(metrics["displacement_abs"], (old - logprobs)[mask].abs().mean().detach())


def test_metrics_are_single_detached_numbers():
    for function in (llds_loss, grpo_policy_loss):
        output = function(*batch())
        assert output.loss.requires_grad
        for value in output.metrics.values():
            assert value.dim() == 0
            assert not value.requires_grad


def test_sums_add_up_and_ratios_are_taken_once():
    tensors = batch()
    whole = llds_loss(*tensors).metrics
    parts = [llds_loss(*part).metrics for part in zip(*(t.split([1, 3, 2]) for t in tensors), strict=True)]
    merged = merge_metrics(parts)
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value)
    assert merge_metrics([{"gate_rate": torch.ones(())}] * 2) == {}, "a ratio must never be added"
    averaged = torch.stack([part["gate_rate"] for part in parts]).nanmean()
    assert averaged != whole["gate_rate"]


def test_nothing_measured_is_not_zero():
    logprobs, old, _, mask = batch()
    metrics = llds_loss(logprobs, old, -torch.ones(6), mask).metrics
    assert metrics["displacement_positive"].isnan()
    assert metrics["gate_rate"].isnan()
    assert metrics["penalty_sum"] == 0


def test_a_structural_zero_can_be_told_from_a_measured_one():
    _, old, advantages, mask = batch()
    structural = llds_loss(old, old, advantages, mask)
    measured = llds_loss(old + 0.1, old, advantages, mask)
    assert structural.loss == measured.loss == 0
    assert structural.metrics["moved_tokens"] == 0
    assert measured.metrics["moved_tokens"] == mask.sum()


@pytest.mark.parametrize("source", NORMALIZERS)
@pytest.mark.parametrize("target", NORMALIZERS)
def test_a_converted_coefficient_gives_the_same_loss(source, target):
    tensors = batch()
    output = llds_loss(*tensors, coef=0.2, normalizer=source)
    coef = convert_coef(0.2, source, target, output.metrics)
    converted = llds_loss(*tensors, coef=coef, normalizer=target)
    assert output.loss > 0
    torch.testing.assert_close(converted.loss, output.loss, rtol=1e-6, atol=0)


def test_every_normaliser_is_a_metric():
    metrics = llds_loss(*batch()).metrics
    counts = [normalizer_count(name, metrics) for name in ("all", "preserved", "gated", "penalised")]
    assert counts == sorted(counts, reverse=True)
    with pytest.raises(LLDSError, match="normalizer must be one of"):
        normalizer_count("tokens", metrics)


def test_every_ratio_is_made_of_metrics_that_exist():
    names = set(llds_loss(*batch()).metrics) | set(grpo_policy_loss(*batch()).metrics) | {"kl_sum"}
    assert {part for pair in RATIOS.values() for part in pair} <= names


def test_importing_llds_imports_torch_and_nothing_heavier():
    code = "import sys, torch; before = set(sys.modules); import llds; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = {name.split(".")[0] for name in done.stdout.split()}
    assert "llds" in added
    assert added <= {"llds", *sys.stdlib_module_names}
