"""What is decided on an alarm, how λ moves, and which wrong responses began like a right one."""

import pytest

from llds.dynamics import (
    AlarmPolicy,
    CoefControl,
    Decision,
    Event,
    compare_first_searches,
    controlled_coef,
    decide,
    warmup_coef,
)
from llds.errors import LLDSError


def event(kind="alarm", severity="warning", step=100, onset=60):
    families = ("entropy-gradient", "likelihood")
    return Event(kind, severity, step, 2, onset, families, {}, {}, "Something happened.")


def test_without_an_alarm_nothing_is_done():
    for on_alarm in ("warn", "stop", "rollback"):
        events = [event("phase", "info"), event("recovered", "info")]
        assert decide(AlarmPolicy(on_alarm), events) == Decision("none")


def test_warn_only_tells():
    assert decide(AlarmPolicy(), [event(severity="critical")]) == Decision("warn", "Something happened.")


def test_below_its_severity_an_alarm_is_only_told():
    policy = AlarmPolicy("stop", act_from="critical")
    assert decide(policy, [event()]).action == "warn"
    assert decide(policy, [event(), event(severity="critical")]).action == "stop"


def test_rollback_goes_to_the_last_checkpoint_before_the_onset():
    policy = AlarmPolicy("rollback", coef_factor=2.0)
    decision = decide(policy, [event()], checkpoints=[20, 59, 40, 60, 80], coef=0.2)
    assert (decision.action, decision.checkpoint, decision.coef) == ("rollback", 59, 0.4)
    assert "step 59 and λ rises from 0.2 to 0.4" in decision.reason


def test_without_a_known_onset_the_alarm_itself_counts():
    decision = decide(AlarmPolicy("rollback"), [event(onset=None)], checkpoints=[20, 99, 100])
    assert decision.checkpoint == 99


@pytest.mark.parametrize(
    ("settings", "coef", "expected"),
    [
        ({}, 0.2, None),
        ({"coef_factor": 3.0}, 0.2, pytest.approx(0.6)),
        ({"coef_factor": 3.0, "coef_limit": 0.5}, 0.2, 0.5),
        ({"coef_factor": 3.0, "coef_limit": 0.1}, 0.2, None),
        ({"coef_factor": 3.0}, 0.0, None),
        ({"coef_factor": 3.0, "coef_start": 0.1}, 0.0, 0.1),
    ],
)
def test_how_a_rollback_raises_the_coefficient(settings, coef, expected):
    decision = decide(AlarmPolicy("rollback", **settings), [event()], checkpoints=[10], coef=coef)
    assert decision.action == "rollback"
    assert decision.coef == expected


def test_what_cannot_be_rolled_back_stops():
    policy = AlarmPolicy("rollback", max_rollbacks=1)
    none_left = decide(policy, [event()], checkpoints=[60, 80])
    assert none_left.action == "stop"
    assert "No checkpoint is older" in none_left.reason
    too_often = decide(policy, [event()], checkpoints=[10], rollbacks=1)
    assert too_often.action == "stop"
    assert "1 times already" in too_often.reason


def test_a_policy_is_checked():
    with pytest.raises(LLDSError, match="on_alarm must be one of"):
        AlarmPolicy("panic")
    with pytest.raises(LLDSError, match="act_from must be one of"):
        AlarmPolicy(act_from="info")
    with pytest.raises(LLDSError, match="coef_factor must be at least 1"):
        AlarmPolicy(coef_factor=0.5)


def test_warmup_rises_linearly_and_stays():
    assert [warmup_coef(0.2, step, 4) for step in range(6)] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])
    assert warmup_coef(0.2, 0, 0) == 0.2
    with pytest.raises(LLDSError, match="warmup_steps must be at least 0"):
        warmup_coef(0.2, 0, -1)


def test_control_moves_the_coefficient_against_displacement():
    control = CoefControl(rate=1.1, width=1e-3, lower=0.05, upper=0.5)
    assert controlled_coef(0.2, 1e-3, control) == pytest.approx(0.22)
    assert controlled_coef(0.2, 1.0, control) == pytest.approx(0.22)
    assert controlled_coef(0.2, -1.0, control) == pytest.approx(0.2 / 1.1)
    assert controlled_coef(0.2, 5e-4, control) == pytest.approx(0.2 * 1.1**0.5)
    assert controlled_coef(0.2, 0.0, control) == pytest.approx(0.2)
    for nothing in (None, float("nan")):
        assert controlled_coef(0.2, nothing, control) == 0.2
    assert controlled_coef(0.49, 1.0, control) == 0.5
    assert controlled_coef(0.0, None, control) == 0.05


def test_control_holds_a_run_that_answers_to_it():
    control, coef, displacement = CoefControl(target=1e-3), 0.02, 0.0
    for _ in range(600):
        displacement = 4e-3 - 0.01 * coef
        coef = controlled_coef(coef, displacement, control)
    assert displacement == pytest.approx(1e-3, abs=1e-4)
    assert coef == pytest.approx(0.3, rel=0.05)


def test_control_settings_are_checked():
    with pytest.raises(LLDSError, match="rate must be above 1"):
        CoefControl(rate=1.0)
    with pytest.raises(LLDSError, match="upper must be at least"):
        CoefControl(lower=1.0, upper=0.5)
    with pytest.raises(LLDSError, match="target must be a finite number"):
        CoefControl(target=float("inf"))


def test_first_searches_are_compared_within_their_group():
    found = [("p1",), ("p1",), ("p2",), None, ("p1",), ("p1",), None, ("p3",)]
    advantages = [1, -1, -1, -1, -1, -1, 1, 0]
    groups = ["a", "a", "a", "a", "b", "c", "c", "a"]
    #         right shared other none  no right one in b; in c it did not search
    assert compare_first_searches(found, advantages, groups) == [-1, 1, 0, 0, -1, -1, -1, -1]


def test_first_searches_of_equal_rewards_are_not_compared():
    assert compare_first_searches([("p",)] * 2, [7e-4, -7e-5], [0, 0]) == [-1, -1]
    assert compare_first_searches([], [], []) == []
    with pytest.raises(LLDSError, match="one entry per response"):
        compare_first_searches([None], [1.0, 2.0], [0])
