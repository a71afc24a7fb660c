"""The loss against numbers that the authors' own code computed."""

import json
from pathlib import Path

import pytest
import torch

from llds import llds_loss

CASES = json.loads((Path(__file__).parent / "fixtures" / "authors_llds.json").read_text())["cases"]


@pytest.mark.parametrize("compat", [None, "authors"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['gate']}-{case['seed']}")
def test_value_and_gradient_are_the_authors(case, compat):
    def tensor(key):
        return torch.tensor(case[key], dtype=torch.float64)

    logprobs = tensor("logp").requires_grad_()
    options = {}
    if case["answer_mask"] is not None:
        # There 1 means "not the answer", and answer tokens have a coefficient of their own.
        answer_coef = min(case["answer_weight_lambda"], case["lam"])
        options = {"answer_mask": 1 - tensor("answer_mask"), "answer_weight": answer_coef / case["lam"]}
    loss = llds_loss(
        logprobs,
        tensor("old_logp"),
        tensor("advantages"),
        tensor("mask"),
        # The authors hold the coefficient of a token in float32, also when everything else is float64.
        coef=torch.tensor(case["lam"], dtype=torch.float32),
        gate=case["gate"],
        compat=compat,
        **options,
    ).loss
    loss.backward()

    assert loss.item() == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(logprobs.grad, tensor("grad"), rtol=0, atol=1e-9)


def test_the_cases_are_worth_comparing():
    assert {case["gate"] for case in CASES} == {"action", "response"}
    assert sum(case["loss"] > 0 for case in CASES) >= 20
    assert any(case["answer_mask"] for case in CASES)
