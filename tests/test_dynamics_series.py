"""The series of a step: against a slow reference, in any cut, over two processes, and with hostile input."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from llds import llds_loss
from llds.dynamics import SERIES, Measure, StepAccumulator, measure, read_series
from llds.dynamics.series import SIZE
from llds.dynamics.vocabulary import TOTALS
from llds.errors import LLDSError
from test_objective_device import NoWaiting

SIGNS = ("correct", "neutral", "wrong")
NAN, INF = float("nan"), float("inf")


def make_batch(rows=12, length=40, seed=0, dtype=torch.float32):
    """Return a batch with actions of uneven length between feedback, padding, and all three signs."""
    random = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=random, dtype=torch.float64)
    new = old + 0.1 * torch.randn(rows, length, generator=random, dtype=torch.float64)
    mask = torch.zeros(rows, length, dtype=torch.long)
    answer = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        ends = sorted(torch.randperm(length, generator=random)[: 2 + row % 11].tolist())
        for start, end in zip(ends[::2], ends[1::2], strict=False):
            mask[row, start : end + 1] = 1
            answer[row] = 0
            answer[row, start : end + 1] = 1
    advantages = torch.randn(rows, generator=random).sign() * (torch.arange(rows) % 3 != 0)
    return {
        "logprobs": new.to(dtype),
        "old_logprobs": old.to(dtype),
        "advantages": advantages,
        "response_mask": mask,
        "answer_mask": answer,
        "entropies": torch.rand(rows, length, generator=random).to(dtype),
        "first_search": torch.randint(-1, 2, (rows,), generator=random),
        "updates": 2,
    }


def cut(batch, rows):
    """Take some rows of a batch, without the padding that they don't need."""
    length = max(1, int(batch["response_mask"][rows].any(0).nonzero().max()) + 1)
    parts = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            value = value[rows]
            value = value[:, :length] if value.dim() == 2 else value
        parts[name] = value
    return parts


def actions_of(mask):
    """Return the runs of ones as lists of positions."""
    runs = []
    for i, bit in enumerate(mask):
        if bit and (i == 0 or not mask[i - 1]):
            runs.append([])
        if bit:
            runs[-1].append(i)
    return runs


def mean(values):
    return math.fsum(values) / len(values) if values else None


def reference(batch, how):
    """Compute every series of a batch in plain Python, response by response, token by token."""
    lists = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
    tokens, actions, responses, entropies = [], [], [], []
    counts = dict.fromkeys(
        ("nonfinite_tokens", "nonfinite_entropies", "dropped_responses", "empty_responses"), 0
    )
    for row, mask in enumerate(lists["response_mask"]):
        runs = actions_of(mask)
        advantage = lists["advantages"][row]
        new, old = lists["logprobs"][row], lists["old_logprobs"][row]
        flat = [i for run in runs for i in run]
        bad = [i for i in flat if not all(map(math.isfinite, (new[i], old[i], advantage)))]
        counts["nonfinite_tokens"] += len(bad)
        counts["dropped_responses"] += bool(bad)
        counts["empty_responses"] += not flat
        entropy = lists["entropies"][row]
        counts["nonfinite_entropies"] += sum(not math.isfinite(entropy[i]) for i in flat)
        if bad or not flat:
            continue
        sign = 0 if advantage > how.advantage_tol else 2 if advantage < -how.advantage_tol else 1
        total = math.fsum(old[i] - new[i] for i in flat)
        responses.append({"sign": SIGNS[sign], "lld": -total <= how.lld_epsilon})
        excess = math.fsum(old[i] - new[i] - how.dead_zone for i in flat)
        for index, run in enumerate(runs):
            fallen = math.fsum(old[i] - new[i] for i in run)
            gates = {
                "action": math.fsum(old[i] - new[i] - how.dead_zone for i in run) > 0,
                "response": excess > 0,
                "token": True,
            }
            is_open = gates[how.gate]
            actions.append({"sign": SIGNS[sign], "lld": -fallen <= how.lld_epsilon, "open": is_open})
            for i in run:
                d = old[i] - new[i]
                cost = max(0.0, d - how.dead_zone) if is_open else 0.0
                is_answer = bool(lists["answer_mask"][row][i])
                tokens.append((SIGNS[sign], index, is_answer, new[i], d, cost))
                if math.isfinite(entropy[i]):
                    entropies.append(entropy[i])
    expected = dict.fromkeys((n for n, s in SERIES.items() if s.source == "batch"))
    parts = {
        "": lambda t: True,
        "_first": lambda t: t[1] == 0,
        "_second": lambda t: t[1] == 1,
        "_later": lambda t: t[1] >= 2,
        "_answer": lambda t: t[2],
    }
    for sign in SIGNS:
        for part, inside in parts.items():
            chosen = [t for t in tokens if t[0] == sign and inside(t)]
            expected[f"logprob_{sign}{part}"] = mean([t[3] for t in chosen])
            expected[f"displacement_{sign}{part}"] = mean([t[4] for t in chosen])
        expected[f"lld_actions_{sign}"] = mean([a["lld"] for a in actions if a["sign"] == sign])
        expected[f"lld_responses_{sign}"] = mean([r["lld"] for r in responses if r["sign"] == sign])
        expected[f"responses_{sign}"] = sum(r["sign"] == sign for r in responses)
    kept = [t for t in tokens if t[0] != "wrong"]
    expected["gate_rate"] = mean([a["open"] for a in actions if a["sign"] != "wrong"])
    expected["preserved_share"] = len(kept) / len(tokens) if tokens else None
    expected["penalised_share"] = mean([t[5] > 0 for t in kept])
    expected["penalty"] = mean([t[5] for t in kept])
    for rounds in range(5):
        after = [t for t in tokens if min(t[1], 4) == rounds]
        nll = mean([t[3] for t in after])
        expected[f"nll_round_{rounds}"] = None if nll is None else -nll
    found = [f for f in lists["first_search"] if f >= 0]
    expected["first_search_shared"] = mean([f == 1 for f in found])
    distance = [abs(t[4]) for t in tokens]
    expected["displacement_abs"] = mean(distance)
    expected["moved_share"] = mean([d > 0 for d in distance])
    expected["ratio_spikes"] = mean([d > math.log(how.spike_ratio) for d in distance])
    expected["noise_floor"] = mean(distance) if lists["updates"] == 0 else None
    expected["policy_entropy"] = mean(entropies)
    expected["updates_since_rollout"] = lists["updates"] if responses else None
    expected |= {"tokens": len(tokens), "actions": len(actions), "micro_batches": 1, **counts}
    return expected


def assert_same(got, expected, tolerance=1e-9):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert got[name] == pytest.approx(value, abs=tolerance), name


def series_of(*batches, how=None):
    accumulator = StepAccumulator(how)
    for batch in batches:
        accumulator.add(**batch)
    return read_series(accumulator.sums())


@pytest.mark.parametrize("gate", ["action", "response", "token"])
@pytest.mark.parametrize("updates", [0, 3])
def test_every_series_equals_the_slow_reference(gate, updates):
    how = Measure(lld_epsilon=-0.05, gate=gate, dead_zone=0.01, spike_ratio=1.15)
    seen = set()
    for seed in range(3):
        batch = {**make_batch(seed=seed, dtype=torch.float64), "updates": updates}
        batch["logprobs"][5, 7] = NAN
        batch["response_mask"][5, 7] = 1
        batch["response_mask"][4] = 0
        batch["entropies"][2, :] = INF
        got = series_of(batch, how=how)
        assert_same(got, reference(batch, how))
        seen |= {name for name, value in got.items() if value is not None}
    assert set(got) - seen == ({"noise_floor"} if updates else set())


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [3, 1, 6, 2]])
def test_the_cut_into_micro_batches_does_not_matter(sizes):
    batch = make_batch()
    whole = series_of(batch)
    rows = torch.randperm(12, generator=torch.Generator().manual_seed(1)).split(sizes)
    parts = series_of(*(cut(batch, chosen) for chosen in rows))
    assert parts.pop("micro_batches") == len(sizes)
    whole.pop("micro_batches")
    assert_same(parts, whole, 1e-6)


def rank(index, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=index, world_size=2)
    torch.set_num_threads(1)
    batch, accumulator = make_batch(), StepAccumulator()
    # Uneven shares: the first rank has three micro-batches, the second one.
    for rows in ([[0, 3], [5], [11, 2]], [[1, 4, 6, 7, 8, 9, 10]])[index]:
        accumulator.add(**cut(batch, torch.tensor(rows)))
    sums = accumulator.sums()
    dist.all_reduce(sums)
    torch.save(sums, f"{folder}/{index}.pt")
    dist.destroy_process_group()


def test_two_processes_see_what_one_sees(tmp_path):
    mp.spawn(rank, args=(str(tmp_path),), nprocs=2)
    whole = series_of(make_batch())
    assert whole.pop("micro_batches") == 1
    for index in range(2):
        got = read_series(torch.load(tmp_path / f"{index}.pt"))
        assert got.pop("micro_batches") == 4
        assert_same(got, whole, 1e-6)


def test_a_rank_without_a_micro_batch_adds_nothing():
    idle, busy = StepAccumulator(), StepAccumulator()
    busy.add(**make_batch())
    assert torch.equal(idle.sums() + busy.sums(), busy.sums())
    busy.reset()
    assert torch.equal(idle.sums(), busy.sums())
    assert all(value in (None, 0) for value in read_series(idle.sums()).values())


def test_sums_are_a_copy():
    accumulator = StepAccumulator()
    accumulator.add(**make_batch())
    before = accumulator.sums()
    accumulator.sums().zero_()
    assert torch.equal(accumulator.sums(), before)


@pytest.mark.parametrize("gate", ["action", "response"])
def test_it_reports_what_the_loss_reports(gate):
    batch = make_batch(seed=4)
    arrays = {name: batch[name] for name in ("logprobs", "old_logprobs", "advantages", "response_mask")}
    metrics = llds_loss(**arrays, gate=gate, dead_zone=0.02).metrics
    got = series_of(batch, how=Measure(gate=gate, dead_zone=0.02))
    signs = dict(zip(("positive", "zero", "negative"), SIGNS, strict=True))
    same = ["gate_rate", "preserved_share", "penalised_share", "moved_share", "displacement_abs"]
    for name in same:
        assert got[name] == pytest.approx(metrics[name].item(), rel=1e-5), name
    for theirs, ours in signs.items():
        for kind in ("displacement", "logprob"):
            assert got[f"{kind}_{ours}"] == pytest.approx(metrics[f"{kind}_{theirs}"].item(), rel=1e-4)
        assert got[f"responses_{ours}"] == metrics[f"responses_{theirs}"].item()
    assert got["penalty"] * metrics["preserved_tokens"] == pytest.approx(metrics["penalty_sum"].item())
    assert got["tokens"] == metrics["tokens"].item()
    assert got["actions"] == metrics["actions"].item()


def test_packed_rows_are_the_same_as_padded_ones():
    batch = make_batch()
    rows, length = batch["logprobs"].shape
    packed = {
        name: value.flatten() if isinstance(value, torch.Tensor) and value.dim() == 2 else value
        for name, value in batch.items()
    }
    packed["segment_ids"] = torch.arange(rows).repeat_interleave(length)
    whole, got = series_of(batch), series_of(packed)
    assert whole.pop("empty_responses") == 0
    got.pop("empty_responses")
    assert_same(got, whole, 1e-12)


def test_advantages_may_be_given_per_token():
    batch = make_batch()
    spread = {**batch, "advantages": batch["advantages"].unsqueeze(1).expand_as(batch["logprobs"])}
    assert_same(series_of(spread), series_of(batch), 0)


def test_nothing_waits_for_the_device():
    with NoWaiting():
        accumulator = StepAccumulator()
        for updates in (0, 1):
            accumulator.add(**{**make_small(), "updates": updates})
        accumulator.sums()


def make_small():
    # make_batch itself waits, so this one is made without it.
    old = torch.linspace(-1, 0, 24).view(3, 8)
    ones = torch.ones(3, 8, dtype=torch.long)
    return {
        "logprobs": old * 1.1,
        "old_logprobs": old,
        "advantages": torch.linspace(-1, 1, 3),
        "response_mask": ones,
        "answer_mask": ones,
        "entropies": -old,
        "first_search": torch.zeros(3, dtype=torch.long),
    }


def test_no_gradient_reaches_the_sums():
    batch = make_batch()
    batch["logprobs"].requires_grad_()
    assert not measure(**batch).requires_grad


def test_right_after_a_rollout_the_distance_is_the_noise_floor():
    batch = {**make_batch(), "updates": 0}
    fresh = series_of(batch)
    assert fresh["noise_floor"] == fresh["displacement_abs"] > 0
    assert fresh["updates_since_rollout"] == 0
    mixed = series_of(batch, {**batch, "updates": 4})
    assert mixed["noise_floor"] == pytest.approx(fresh["noise_floor"])
    assert mixed["updates_since_rollout"] == 2
    assert series_of({**batch, "updates": None})["updates_since_rollout"] is None


def test_unmoved_actions_are_not_displaced_by_default_but_are_at_epsilon_zero():
    batch = make_batch()
    batch["logprobs"] = batch["old_logprobs"]
    assert series_of(batch)["lld_actions_correct"] == 0
    assert series_of(batch, how=Measure(lld_epsilon=0.0))["lld_actions_correct"] == 1


def test_equal_rewards_leave_nothing_to_say_of_correct_and_wrong():
    got = series_of({**make_batch(), "advantages": torch.full((12,), 7e-4)})
    assert got["responses_neutral"] == 12
    assert got["displacement_correct"] is None
    assert got["displacement_wrong"] is None
    assert got["displacement_neutral"] is not None
    assert got["preserved_share"] == 1


def test_a_response_with_a_broken_token_is_left_out_and_counted():
    batch = make_batch()
    rest = cut(batch, torch.arange(11))
    batch["old_logprobs"][11] = -INF
    got, expected = series_of(batch), series_of({**rest, "first_search": batch["first_search"]})
    assert got["dropped_responses"] == 1
    assert got["nonfinite_tokens"] == batch["response_mask"][11].sum()
    for name in ("dropped_responses", "nonfinite_tokens", "policy_entropy"):
        got.pop(name), expected.pop(name)
    assert_same(got, expected, 1e-9)


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e38, -1e38, 3.4e38, -3.4e38, 1e-45]),
    st.floats(-50, 0, width=32),
)


@st.composite
def hostile(draw):
    rows, length = draw(st.integers(0, 4)), draw(st.integers(0, 6))

    def tensor(elements, *shape, dtype=torch.float32):
        size = math.prod(shape)
        return torch.tensor(draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype).view(shape)

    bits = st.integers(0, 1)
    return {
        "logprobs": tensor(
            numbers, rows, length, dtype=draw(st.sampled_from([torch.float32, torch.float64]))
        ),
        "old_logprobs": tensor(numbers, rows, length),
        "advantages": tensor(numbers, rows),
        "response_mask": tensor(bits, rows, length, dtype=torch.long),
        "answer_mask": draw(st.none() | st.just(tensor(bits, rows, length, dtype=torch.long))),
        "entropies": draw(st.none() | st.just(tensor(numbers, rows, length))),
        "first_search": draw(st.none() | st.just(tensor(st.integers(-1, 1), rows, dtype=torch.long))),
        "updates": draw(st.none() | st.integers(0, 3)),
    }


@settings(max_examples=150, deadline=None)
@given(hostile(), st.sampled_from(["action", "response", "token"]))
def test_hostile_input_never_crashes_and_never_yields_nan(batch, gate):
    got = series_of(batch, batch, how=Measure(gate=gate))
    assert all(value is None or math.isfinite(value) for value in got.values())
    mask = batch["response_mask"].bool()
    counted = sum(got[f"responses_{sign}"] for sign in SIGNS)
    assert counted + got["dropped_responses"] + got["empty_responses"] == 2 * mask.shape[0]
    finite = batch["logprobs"].isfinite() & batch["old_logprobs"].isfinite()
    finite &= batch["advantages"].isfinite().unsqueeze(1)
    assert got["nonfinite_tokens"] >= 2 * (mask & ~finite).sum()


def test_feedback_and_padding_are_never_read():
    batch = make_batch()
    clean = series_of(batch)
    outside = ~batch["response_mask"].bool()
    for name in ("logprobs", "old_logprobs", "entropies"):
        batch[name] = batch[name].masked_fill(outside, NAN)
    batch["answer_mask"] = batch["answer_mask"] | outside
    assert_same(series_of(batch), clean, 0)


def test_wrong_shapes_and_numbers_are_told():
    batch = make_batch()
    with pytest.raises(LLDSError, match="old_logprobs must have the shape"):
        measure(**{**batch, "old_logprobs": batch["old_logprobs"][:, 1:]})
    with pytest.raises(LLDSError, match="updates must be at least 0"):
        measure(**{**batch, "updates": -1})
    with pytest.raises(LLDSError, match=f"sums must hold {SIZE} numbers"):
        read_series([0.0])
    with pytest.raises(LLDSError, match="spike_ratio must be above 1"):
        Measure(spike_ratio=1.0)
    with pytest.raises(LLDSError, match="gate must be one of"):
        Measure(gate="word")
    with pytest.raises(LLDSError, match="lld_epsilon"):
        Measure(lld_epsilon=NAN)


def test_every_series_has_a_unique_key_and_a_full_description():
    assert len({series.key for series in SERIES.values()}) == len(SERIES)
    for name, series in SERIES.items():
        assert series.name == name
        assert series.unit
        assert series.meaning
        assert series.equation
        assert (series.quotient is None) == (series.source != "batch"), name
    assert SERIES["displacement_correct"].key == "llds/displacement_correct"
    assert SERIES["grad_norm"].key == "grad_norm"
    read = {s.quotient.top for s in SERIES.values() if s.quotient}
    read |= {s.quotient.bottom for s in SERIES.values() if s.quotient}
    assert set(TOTALS) <= read
