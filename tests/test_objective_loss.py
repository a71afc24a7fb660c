"""The loss against a slow reference in plain Python, and what must hold for any batch."""

import math
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llds import llds_loss
from llds.errors import LLDSError
from llds.objective import segment_ids_from_cu_seqlens

GATES = ("action", "response", "token")
NORMALIZERS = ("all", "preserved", "gated", "penalised", "response")
NAN = float("nan")


def make(logprobs, old_logprobs, advantages, mask, dtype=torch.float64):
    return (
        torch.tensor(logprobs, dtype=dtype).requires_grad_(),
        torch.tensor(old_logprobs, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.tensor(mask, dtype=torch.long),
    )


@st.composite
def batches(draw, max_rows=4, max_length=10):
    """Draw a batch as lists. Log-probs are sixty-fourths, so that sums in float64 are exact in any order."""
    rows, length = draw(st.integers(1, max_rows)), draw(st.integers(1, max_length))

    def matrix(element):
        return draw(
            st.lists(
                st.lists(element, min_size=length, max_size=length),
                min_size=rows,
                max_size=rows,
            )
        )

    logprob = st.integers(-128, 0).map(lambda n: n / 64)
    advantage = st.sampled_from([-1.5, -0.25, -5e-4, 0.0, 5e-4, 0.25, 1.5])
    advantages = draw(st.lists(advantage, min_size=rows, max_size=rows))
    return matrix(logprob), matrix(logprob), advantages, matrix(st.integers(0, 1))


def gradient(*batch, **options):
    output = llds_loss(*batch, **options)
    return torch.autograd.grad(output.loss, batch[0])[0]


def reference(
    logprobs, old_logprobs, advantages, mask, *, coef, gate, normalizer, dead_zone=0.0, penalty="relu"
):
    """Return loss, gradient and counts, token by token."""
    gradient = [[0.0] * len(row) for row in logprobs]
    total, counts = 0.0, dict.fromkeys(NORMALIZERS, 0)
    counts |= {"actions": 0, "actions_preserved": 0, "actions_open": 0}
    for b, row in enumerate(mask):
        policy = [t for t, bit in enumerate(row) if bit]
        runs = [[t for t, _ in run] for bit, run in groupby(enumerate(row), lambda item: item[1]) if bit]
        counts["all"] += len(policy)
        counts["response"] += bool(policy)
        counts["actions"] += len(runs)
        if advantages[b] < -1e-3:
            continue
        counts["preserved"] += len(policy)
        counts["actions_preserved"] += len(runs)
        for action in runs:
            unit = action if gate == "action" else policy
            lost = sum(old_logprobs[b][t] - logprobs[b][t] for t in unit)
            if gate != "token" and not lost > dead_zone * len(unit):
                continue
            counts["actions_open"] += 1
            for t in action:
                counts["gated"] += 1
                drop = old_logprobs[b][t] - logprobs[b][t] - dead_zone
                if drop <= 0:
                    continue
                counts["penalised"] += 1
                small = penalty == "huber" and drop < 0.5
                total += drop**2 if small else drop - (0.25 if penalty == "huber" else 0)
                gradient[b][t] = -coef * (2 * drop if small else 1)
    count = max(counts[normalizer], 1)
    return coef * total / count, [[g / count for g in row] for row in gradient], counts


@settings(max_examples=60, deadline=None)
@given(
    batches(),
    st.sampled_from(GATES),
    st.sampled_from(NORMALIZERS),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from(["relu", "huber"]),
)
def test_the_reference_agrees(batch, gate, normalizer, dead_zone, penalty):
    options = {
        "coef": 0.3,
        "gate": gate,
        "normalizer": normalizer,
        "dead_zone": dead_zone,
        "penalty": penalty,
    }
    loss, expected_gradient, counts = reference(*batch, **options)
    tensors = make(*batch)
    output = llds_loss(*tensors, huber_width=0.5, **options)
    (actual,) = torch.autograd.grad(output.loss, tensors[0])

    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(actual, torch.tensor(expected_gradient, dtype=torch.float64))
    for name in ("actions", "actions_preserved", "actions_open"):
        assert output.metrics[name] == counts[name]
    for name, metric in zip(
        NORMALIZERS,
        ("tokens", "preserved_tokens", "gated_tokens", "penalised_tokens", "responses"),
        strict=True,
    ):
        assert output.metrics[metric] == counts[name]


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(GATES))
def test_what_did_not_fall_costs_nothing(batch, gate):
    logprobs, old, advantages, mask = make(*batch)
    risen = torch.maximum(logprobs.detach(), old).requires_grad_()
    output = llds_loss(risen, old, advantages, mask, gate=gate)
    assert output.loss == 0
    assert not torch.autograd.grad(output.loss, risen)[0].any()


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(GATES))
def test_gradient_is_full_on_penalised_tokens_and_zero_elsewhere(batch, gate):
    logprobs, old, advantages, mask = make(*batch)
    answer = torch.zeros_like(mask)
    answer[:, -2:] = 1
    output = llds_loss(
        logprobs, old, advantages, mask, coef=0.5, gate=gate, answer_mask=answer, answer_weight=0.25
    )
    (slope,) = torch.autograd.grad(output.loss, logprobs)
    full = -0.5 * (1 - 0.75 * answer.double()) / output.metrics["tokens"].clamp(min=1)
    assert ((slope == 0) | torch.isclose(slope, full, rtol=1e-12, atol=0)).all()
    assert (slope != 0).sum() == output.metrics["penalised_tokens"]
    fell = (old > logprobs) & mask.bool() & (advantages >= -1e-3)[:, None]
    assert fell[slope != 0].all()


@settings(max_examples=40, deadline=None)
@given(batches())
def test_the_token_gate_lets_through_whatever_the_others_do(batch):
    tensors = make(*batch)
    by_token = gradient(*tensors, gate="token") != 0
    assert by_token[gradient(*tensors, gate="action") != 0].all()
    assert by_token[gradient(*tensors, gate="response") != 0].all()


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(0, 3), st.integers(0, 3), st.sampled_from(GATES), st.sampled_from(NORMALIZERS))
def test_padding_is_invisible(batch, before, after, gate, normalizer):
    logprobs, old, advantages, mask = make(*batch)

    def pad(tensor, value):
        return torch.nn.functional.pad(tensor, (before, after, 0, 1), value=value)

    plain = llds_loss(logprobs, old, advantages, mask, gate=gate, normalizer=normalizer)
    padded = llds_loss(
        pad(logprobs, NAN),
        pad(old, math.inf),
        torch.cat([advantages, advantages.new_tensor([NAN])]),
        pad(mask, 0),
        gate=gate,
        normalizer=normalizer,
    )
    assert padded.loss.item() == pytest.approx(plain.loss.item(), abs=1e-15)
    for name, value in plain.metrics.items():
        torch.testing.assert_close(padded.metrics[name], value, equal_nan=True)
    slopes = [torch.autograd.grad(output.loss, logprobs)[0] for output in (plain, padded)]
    torch.testing.assert_close(*slopes)


@settings(max_examples=30, deadline=None)
@given(batches(), st.randoms(use_true_random=False), st.sampled_from(GATES))
def test_the_order_of_rows_is_invisible(batch, random, gate):
    tensors = make(*batch)
    order = list(range(len(batch[2])))
    random.shuffle(order)
    shuffled = [tensor.detach()[order] for tensor in tensors]
    assert llds_loss(*shuffled, gate=gate).loss.item() == pytest.approx(
        llds_loss(*tensors, gate=gate).loss.item(), abs=1e-15
    )


@settings(max_examples=30, deadline=None)
@given(batches(max_rows=6), st.integers(1, 3), st.sampled_from(GATES), st.sampled_from(NORMALIZERS))
def test_a_split_batch_with_the_global_count_is_the_whole_batch(batch, size, gate, normalizer):
    metric = {"all": "tokens", "response": "responses"}.get(normalizer, f"{normalizer}_tokens")
    tensors = make(*batch)
    whole = llds_loss(*tensors, gate=gate, normalizer=normalizer)
    count = whole.metrics[metric]
    parts = [
        llds_loss(*part, gate=gate, normalizer=normalizer, token_count=count)
        for part in zip(*(tensor.split(size) for tensor in tensors), strict=True)
    ]
    total = sum(part.loss for part in parts)
    assert total.item() == pytest.approx(whole.loss.item(), abs=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(total, tensors[0])[0], torch.autograd.grad(whole.loss, tensors[0])[0]
    )


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(GATES), st.sampled_from(NORMALIZERS), st.booleans())
def test_packed_is_padded(batch, gate, normalizer, per_segment):
    logprobs, old, advantages, mask = make(*batch)
    rows, length = mask.shape
    # Rows of unequal length, laid end to end: the action at the end of one must not run on into the next.
    lengths = [1 + (b * 3) % length for b in range(rows)]
    kept = torch.arange(length) < torch.tensor(lengths)[:, None]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    ids = segment_ids_from_cu_seqlens(bounds, int(kept.sum()) + 2)

    def pack(tensor, value):
        return torch.cat([tensor[kept], tensor.new_full((2,), value)])

    options = {"gate": gate, "normalizer": normalizer}
    padded = llds_loss(logprobs, old, advantages, mask * kept, **options)
    spread = advantages[:, None].expand(rows, length)
    packed = llds_loss(
        pack(logprobs, NAN),
        pack(old, 0.0),
        advantages if per_segment else pack(spread, NAN),
        pack(mask, 0),
        segment_ids=ids,
        **options,
    )
    assert packed.loss.item() == pytest.approx(padded.loss.item(), abs=1e-15)
    for name, value in padded.metrics.items():
        torch.testing.assert_close(packed.metrics[name], value, equal_nan=True)
    slopes = [torch.autograd.grad(output.loss, logprobs)[0] for output in (padded, packed)]
    torch.testing.assert_close(*slopes)


def test_packed_rows_may_carry_any_ids_and_a_batch_dimension():
    logprobs, old, advantages, mask = make(
        [[-2.0, -1.0, -1.0], [-0.5, -1.0, -1.5]], [[-1.0] * 3] * 2, [1.0, 0.0], [[0, 1, 1], [1, 1, 1]]
    )
    padded = llds_loss(logprobs, old, advantages, mask, gate="token")
    per_token = advantages[:, None].expand(2, 3).reshape(1, 6)
    row = [tensor.reshape(1, 6) for tensor in (logprobs, old, per_token, mask)]
    for ids in ([7, 7, 7, -3, -3, -3], [-3, -3, -3, 7, 7, 7]):
        packed = llds_loss(*row, segment_ids=torch.tensor([ids], dtype=torch.int32), gate="token")
        assert packed.loss == padded.loss > 0
        assert packed.metrics["actions"] == padded.metrics["actions"] == 2


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_advantages_in_every_shape(shape):
    logprobs, old, advantages, mask = make([[-2.0] * 3] * 2, [[-1.0] * 3] * 2, [1.0, -1.0], [[1, 1, 0]] * 2)
    advantages = advantages[:, None].expand(2, 3) if shape == (2, 3) else advantages.reshape(shape)
    output = llds_loss(logprobs, old, advantages, mask, coef=1.0)
    assert output.loss.item() == pytest.approx(2 / 4)
    assert output.metrics["responses_positive"] == output.metrics["responses_negative"] == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_masks_in_every_dtype(dtype):
    logprobs, old, advantages, mask = make([[-2.0, -9.0]], [[-1.0, -1.0]], [1.0], [[1, 0]])
    assert llds_loss(logprobs, old, advantages, mask.to(dtype), coef=1.0).loss == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(4, 200, generator=generator).to(dtype)
    logprobs = (old - 0.05 * torch.randn(4, 200, generator=generator)).to(dtype).requires_grad_()
    mask = (torch.rand(4, 200, generator=generator) > 0.2).long()
    advantages = torch.tensor([1.0, 0.5, 0.0, -1.0], dtype=dtype)
    output = llds_loss(logprobs, old, advantages, mask)
    exact = llds_loss(logprobs.double(), old.double(), advantages.double(), mask)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)
    assert output.metrics["penalised_tokens"] == exact.metrics["penalised_tokens"]
    (slope,) = torch.autograd.grad(output.loss, logprobs)
    assert slope.dtype == dtype
    assert slope.any()


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_nothing_gets_through_the_mask(bad):
    logprobs, old, advantages, mask = make([[-2.0, bad, -2.0]], [[-1.0, -1.0, bad]], [1.0], [[1, 0, 0]])
    output = llds_loss(logprobs, old, advantages, mask, coef=1.0)
    assert output.loss == 1.0
    assert torch.autograd.grad(output.loss, logprobs)[0].tolist() == [[-1.0, 0.0, 0.0]]
    assert output.metrics["nonfinite_tokens"] == 0
    assert all(
        value.isfinite() for name, value in output.metrics.items() if not name.endswith(("zero", "negative"))
    )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("penalty", ["relu", "huber"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("where", ["logprobs", "old", "advantages"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_fault_under_the_mask_is_seen(gate, penalty, advantage, where, bad):
    logprobs, old, advantages, mask = make(
        [[-0.5, -2.0], [-2.0, -2.0]], [[-1.0] * 2] * 2, [[advantage] * 2, [1.0] * 2], [[1, 1]] * 2
    )
    with torch.no_grad():
        {"logprobs": logprobs, "old": old, "advantages": advantages}[where][0, 0] = bad
    output = llds_loss(logprobs, old, advantages, mask, gate=gate, penalty=penalty)
    (slope,) = torch.autograd.grad(output.loss, logprobs)
    assert output.loss.isnan()
    assert output.metrics["nonfinite_tokens"] == 1
    assert slope[0, 0].isnan()
    assert slope[1].isfinite().all()


def test_the_action_gate_is_about_the_whole_action():
    # First action: one token fell by 1, the other rose by 2. Second: one fell by 2, the other rose by 1.
    logprobs, old, advantages, mask = make(
        [[-2.0, -1.0, 0.0, -3.0, -1.0]], [[-1.0, -3.0, 0.0, -1.0, -2.0]], [0.0], [[1, 1, 0, 1, 1]]
    )
    penalised = {gate: gradient(logprobs, old, advantages, mask, gate=gate)[0] != 0 for gate in GATES}
    assert penalised["action"].tolist() == [False, False, False, True, False]
    assert penalised["response"].tolist() == [False] * 5
    assert penalised["token"].tolist() == [True, False, False, True, False]


def test_rounding_of_the_advantage_does_not_decide():
    logprobs, old, advantages, mask = make([[-2.0]] * 4, [[-1.0]] * 4, [7e-4, -7e-5, 0.25, -0.25], [[1]] * 4)
    assert llds_loss(logprobs, old, advantages, mask).metrics["preserved_tokens"] == 3
    assert llds_loss(logprobs, old, advantages, mask, preserve="positive").metrics["preserved_tokens"] == 1
    assert llds_loss(logprobs, old, advantages, mask, advantage_tol=0).metrics["preserved_tokens"] == 2
    assert llds_loss(logprobs, old, advantages, mask, compat="authors").metrics["preserved_tokens"] == 2


def test_authors_gates_look_at_runs_of_preserved_tokens():
    # One action of three tokens whose middle has a negative advantage: two runs there, one action here.
    logprobs, old, advantages, mask = make(
        [[-2.0, -1.0, -0.5]], [[-1.0, -1.0, -2.0]], [[1.0, -1.0, 1.0]], [[1, 1, 1]]
    )
    assert llds_loss(logprobs, old, advantages, mask).loss == 0
    output = llds_loss(logprobs, old, advantages, mask, coef=1.0, compat="authors")
    assert output.loss.item() == pytest.approx(1 / 3)


def test_the_dead_zone_keeps_noise_from_opening_gates():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8, 300, generator=generator, dtype=torch.float64)
    logprobs = (old + 1e-4 * torch.randn(8, 300, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages, mask = torch.ones(8), torch.rand(8, 300, generator=generator) > 0.2
    bare = llds_loss(logprobs, old, advantages, mask).metrics
    quiet = llds_loss(logprobs, old, advantages, mask, dead_zone=torch.tensor(1e-3))
    assert bare["gate_rate"] > 0.3
    assert quiet.metrics["gate_rate"] == quiet.loss == 0


def test_the_gradient_of_huber_fades_with_the_drop():
    drops = [0.01, 0.05, 0.1, 0.5]
    logprobs, old, advantages, mask = make([[-drop for drop in drops]], [[0.0] * 4], [1.0], [[1] * 4])
    slope = gradient(logprobs, old, advantages, mask, coef=4.0, penalty="huber", huber_width=0.1)
    torch.testing.assert_close(slope, -torch.tensor([[0.1, 0.5, 1.0, 1.0]], dtype=torch.float64))


def test_numbers_may_be_tensors_and_only_the_new_policy_gets_a_gradient():
    logprobs, old, advantages, mask = make([[-2.0, -3.0]], [[-1.0, -1.0]], [1.0], [[1, 1]])
    output = llds_loss(
        logprobs,
        old.requires_grad_(),
        advantages.requires_grad_(),
        mask,
        coef=torch.tensor(0.5),
        answer_mask=torch.tensor([[0, 1]]),
        answer_weight=torch.tensor(0.5),
        token_count=torch.tensor(10),
    )
    assert output.loss.item() == pytest.approx(0.5 * (1 + 2 * 0.5) / 10)
    assert output.metrics["answer_tokens"] == 1
    assert torch.autograd.grad(output.loss, [old, advantages], allow_unused=True) == (None, None)


def test_an_empty_batch_costs_nothing():
    for shape in ((0, 5), (3, 0), (2, 4)):
        logprobs = torch.zeros(shape, requires_grad=True)
        output = llds_loss(logprobs, torch.zeros(shape), torch.ones(shape[0]), torch.zeros(shape))
        assert output.loss == 0
        assert output.metrics["gate_rate"].isnan()
        output.loss.backward()


ROW = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": ROW.long()}, "logprobs must be floating point, but is torch.int64"),
        (
            {"old_logprobs": ROW[:, :2]},
            r"old_logprobs must have the shape of logprobs, \[2, 3\], but has \[2, 2\]",
        ),
        (
            {"response_mask": ROW[0]},
            r"response_mask must have the shape of logprobs, \[2, 3\], but has \[3\]",
        ),
        ({"advantages": ROW[0]}, r"advantages must have shape \[2\], \[2, 1\] or \[2, 3\].*has \[3\]"),
        (
            {"advantages": ROW[:, :2], "segment_ids": ROW.long()},
            r"one per segment, \[S\], but has shape \[2, 2\]",
        ),
        ({"segment_ids": ROW}, "segment_ids must be integers"),
        ({"answer_mask": ROW[0]}, "answer_mask must have the shape"),
        ({"answer_weight": 0.5}, "answer_weight needs answer_mask"),
        ({"gate": "actions"}, "gate must be one of 'action', 'response', 'token', but is 'actions'"),
        (
            {"normalizer": "mean"},
            "normalizer must be one of 'all', 'preserved', 'gated', 'penalised', 'response'",
        ),
        ({"preserve": "all"}, "preserve must be one of"),
        ({"penalty": "l2"}, "penalty must be one of"),
        ({"compat": "paper"}, "compat must be one of None, 'authors'"),
        ({"compat": "authors", "normalizer": "preserved"}, 'compat="authors" goes with'),
        ({"coef": -0.1}, "coef must be at least 0, but is -0.1"),
        ({"coef": NAN}, "coef must be at least 0, but is nan"),
        ({"token_count": 0}, "token_count must be at least 1"),
        ({"huber_width": 0.0}, "huber_width must be above 0"),
    ],
)
def test_mistakes_are_named(changes, message):
    arguments = {
        "logprobs": ROW,
        "old_logprobs": ROW,
        "advantages": ROW[:, 0],
        "response_mask": ROW,
    } | changes
    with pytest.raises(LLDSError, match=message):
        llds_loss(**arguments)


def test_packed_tokens_without_segments_are_a_mistake():
    with pytest.raises(LLDSError, match="also pass segment_ids"):
        llds_loss(ROW[0], ROW[0], ROW[0], ROW[0])
