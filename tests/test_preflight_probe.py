"""The probe on plain functions: losses that are right in any layout pass, and arrays that are wrong do not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llds import llds_loss
from llds.preflight import Intent, ProbeBatch, check_arrays, probe_term


def batch_of(masks, **parts):
    mask = torch.tensor(masks)
    torch.manual_seed(0)
    baseline = -torch.rand(mask.shape, dtype=torch.float64) - 0.1
    return ProbeBatch(baseline, mask, **{"current": baseline.clone(), "is_fresh": True} | parts)


TWO_ACTIONS = [[1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 1, 1]]


def term_of(batch, **options):
    def term(logprobs, advantages):
        return llds_loss(logprobs, batch.baseline, advantages, batch.response_mask, **options).loss

    return term


def faults(report):
    return {one.fault for one in report.findings if one.severity != "info"}


def test_the_plain_function_is_clean():
    batch = batch_of(TWO_ACTIONS)
    report = probe_term(term_of(batch), batch, Intent())
    assert report.findings == ()


def test_a_packed_loss_is_clean():
    """The same responses in one row, without padding, told apart by segments."""
    batch = batch_of(TWO_ACTIONS)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]).bool()
    segments = torch.arange(3).unsqueeze(1).expand(3, 8)[keep]

    def term(logprobs, advantages):
        rows = advantages.unsqueeze(1).expand(3, 8)
        packed = [part[keep] for part in (logprobs, batch.baseline, rows, batch.response_mask)]
        return llds_loss(*packed, segment_ids=segments).loss

    assert probe_term(term, batch, Intent()).findings == ()


@given(
    masks=st.lists(st.lists(st.sampled_from([0, 1, 1, 1]), min_size=9, max_size=9), min_size=3, max_size=6),
    gate=st.sampled_from(["action", "response", "token"]),
    normalizer=st.sampled_from(["all", "preserved", "response"]),
    preserve=st.sampled_from(["nonnegative", "positive"]),
    dead_zone=st.sampled_from([0.0, 0.02]),
    penalty=st.sampled_from(["relu", "huber"]),
)
@settings(max_examples=60, deadline=None)
def test_right_losses_are_never_accused(masks, gate, normalizer, preserve, dead_zone, penalty):
    batch = batch_of(masks)
    options = {"gate": gate, "normalizer": normalizer, "preserve": preserve, "dead_zone": dead_zone}
    width = 0.1 if penalty == "huber" else 0.0
    report = probe_term(
        term_of(batch, penalty=penalty, **options), batch, Intent(huber_width=width, **options)
    )
    wrong = faults(report)
    if not any(any(row) for row in masks):
        assert wrong == {"L4"}
    else:
        assert wrong == set(), report.text


@pytest.mark.parametrize("stray", [2, -100, 0.5])
def test_a_mask_with_other_marks(stray):
    batch = batch_of(TWO_ACTIONS)
    mask = batch.response_mask.double()
    mask[0, 0] = stray
    report = check_arrays(ProbeBatch(batch.baseline, mask), Intent())
    assert faults(report) == {"L4"}
    assert str(float(stray)) in report.text


def test_a_mask_with_padding_and_one_without_any_token():
    batch = batch_of(TWO_ACTIONS)
    attention = torch.ones_like(batch.response_mask)
    attention[0, -2:] = 0
    assert "2 padding tokens" in check_arrays(batch_of(TWO_ACTIONS, attention=attention), Intent()).text
    assert "no policy token at all" in check_arrays(batch_of([[0, 0]]), Intent()).text


def test_a_response_without_tokens_is_told_and_no_fault():
    report = check_arrays(batch_of([[1, 1], [0, 0]]), Intent())
    assert "1 of 2 responses have no policy token" in report.text
    assert report.is_clean


def test_spans_are_shown_as_text():
    texts = [list("abcdefgh")] * 3
    feedback = torch.zeros(3, 8)
    feedback[0, 1:3] = 1
    report = check_arrays(batch_of(TWO_ACTIONS, texts=texts, feedback=feedback), Intent())
    assert "response 0 [  0,   3) policy   'abc'" in report.text
    assert "response 0 [  3,   5) not      'de'" in report.text
    assert "such as 'bc' in response 0" in report.text


def test_old_log_probs_of_the_inference_engine_are_named():
    batch = batch_of(TWO_ACTIONS)
    other = batch.baseline + 0.05 * torch.randn(3, 8, dtype=torch.float64)
    report = check_arrays(batch_of(TWO_ACTIONS, current=other, inference=batch.baseline), Intent())
    assert faults(report) == {"L3"}
    assert "those of the inference engine" in report.text


def test_equal_rewards_everywhere_are_told():
    report = check_arrays(batch_of(TWO_ACTIONS, advantages=torch.zeros(3)), Intent())
    assert report.is_clean
    assert "every response of this batch has A = 0" in report.text


def test_a_loss_that_is_never_called_and_one_without_gradient():
    batch = batch_of(TWO_ACTIONS)
    assert faults(probe_term(lambda logprobs, advantages: logprobs.sum() * 0, batch, Intent())) == {"L9"}
    term = term_of(batch)
    dead = probe_term(lambda logprobs, advantages: term(logprobs.detach(), advantages), batch, Intent())
    assert faults(dead) == {"L2"}
    unreached = probe_term(term, batch, Intent(), reaches_model=lambda logprobs, advantages: 0.0)
    assert faults(unreached) == {"L2"}


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"coef": 0.4}, "L12"),
        ({"coef": 0.5}, "L7"),
        ({"normalizer": "gated"}, "L7"),
        ({"gate": "token"}, "L6"),
        ({"preserve": "positive"}, "L5"),
        ({"advantage_tol": 5.0}, "L5"),
    ],
)
def test_a_loss_with_other_settings_than_meant(options, fault):
    batch = batch_of(TWO_ACTIONS)
    assert faults(probe_term(term_of(batch, **options), batch, Intent())) == {fault}
