"""The objective must neither stall an accelerator nor break a compiled training step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llds import llds_loss
from llds.objective import (
    grpo_advantages,
    grpo_policy_loss,
    gspo_policy_loss,
    k3_kl,
    segment_ids_from_cu_seqlens,
)

WAITS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "unique",
    "masked_select",
    "argwhere",
)


class NoWaiting(TorchDispatchMode):
    """Refuse every operation that makes the host wait for the device or copies from one to the other."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(name == wait or name.startswith(wait + "_") for wait in WAITS):
            raise AssertionError(f"{func} makes the host wait.")
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise AssertionError(f"{func} with a mask has a shape that depends on data.")
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and result.device != args[name == "copy_"].device:
            raise AssertionError(f"{func} copies between host and device.")
        return result


def batch(rows=3, length=16, **options):
    generator = torch.Generator().manual_seed(0)
    values = [-torch.rand(rows, length, generator=generator) for _ in range(2)]
    mask = (torch.rand(rows, length, generator=generator) > 0.3).long()
    return values[0].requires_grad_(), values[1], torch.linspace(-1, 1, rows), mask


def packed():
    logprobs, old, advantages, mask = batch()
    ids = torch.arange(3).repeat_interleave(16)
    return logprobs.detach().flatten().requires_grad_(), old.flatten(), advantages, mask.flatten(), ids


def everything(logprobs, old, advantages, mask, ids=None):
    """Call the whole room once on one batch."""
    losses = [
        llds_loss(
            logprobs,
            old,
            advantages,
            mask,
            gate=gate,
            normalizer=normalizer,
            penalty=penalty,
            answer_mask=mask,
            answer_weight=0.5,
            dead_zone=0.01,
            token_count=token_count,
            compat=compat,
            segment_ids=ids,
        ).loss
        for gate, normalizer, penalty, token_count, compat in (
            ("action", "preserved", "relu", None, None),
            ("response", "response", "huber", 50, None),
            ("token", "all", "relu", torch.ones((), device=logprobs.device), "authors"),
        )
    ]
    policy = {"segment_ids": ids}
    losses.append(grpo_policy_loss(logprobs, old, advantages, mask, clip_high=0.28, **policy).loss)
    losses.append(gspo_policy_loss(logprobs, old, advantages, mask, **policy).loss)
    losses.append(k3_kl(logprobs, old, mask, clamp=10.0, **policy).loss)
    dr_grpo = {"aggregation": "dr_grpo", "max_response_length": 20}
    losses.append(grpo_policy_loss(logprobs, old, advantages, mask, **dr_grpo, **policy).loss)
    total = torch.stack(losses).sum()
    if logprobs.requires_grad:
        total.backward()
    return total


def the_rest(device):
    rewards = torch.zeros(8, device=device)
    grpo_advantages(rewards, 4, valid=torch.ones(8, device=device))
    grpo_advantages(rewards, groups=torch.zeros(8, dtype=torch.long, device=device), scale="none")
    segment_ids_from_cu_seqlens(torch.zeros(4, dtype=torch.int32, device=device), 10)


@pytest.mark.parametrize("tensors", [batch, packed])
def test_nothing_waits_for_the_device(tensors):
    arguments = tensors()
    with NoWaiting():
        everything(*arguments)
        the_rest("cpu")


@pytest.mark.parametrize("tensors", [batch, packed])
def test_it_runs_where_there_are_no_values_at_all(tensors):
    arguments = [tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in tensors()]
    with NoWaiting():
        everything(*arguments)
        the_rest("meta")


def test_the_watch_barks():
    with NoWaiting(), pytest.raises(AssertionError, match="wait"):
        torch.ones(3).sum().item()
    with NoWaiting(), pytest.raises(AssertionError, match="shape that depends on data"):
        torch.ones(3)[torch.ones(3, dtype=torch.bool)]
    with NoWaiting(), pytest.raises(AssertionError, match="copies between"):
        torch.ones(3).to("meta")


@pytest.mark.parametrize("function", [llds_loss, grpo_policy_loss, gspo_policy_loss])
@pytest.mark.parametrize("tensors", [batch, packed])
def test_it_compiles_as_one_graph(function, tensors):
    torch._dynamo.reset()
    logprobs, old, advantages, mask, *ids = tensors()
    options = {"segment_ids": ids[0]} if ids else {}
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    expected = function(logprobs, old, advantages, mask, **options)
    actual = compiled(logprobs, old, advantages, mask, **options)
    torch.testing.assert_close(actual.loss, expected.loss)
    assert actual.metrics.keys() == expected.metrics.keys()
    slopes = [torch.autograd.grad(output.loss, logprobs)[0] for output in (actual, expected)]
    torch.testing.assert_close(*slopes)


def test_a_compiled_loss_meets_new_shapes_without_compiling_for_each():
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(llds_loss, backend=count, fullgraph=True)
    for rows, length in ((3, 16), (4, 20), (5, 31), (6, 7)):
        arguments = batch(rows, length)
        assert compiled(*arguments).loss == llds_loss(*arguments).loss
    assert len(graphs) <= 2


def test_the_default_compiler_agrees():
    torch._dynamo.reset()
    arguments = batch(2, 8)
    # Only the loss is returned, so the metrics are pruned and the compiler has little to do.
    compiled = torch.compile(lambda *tensors: llds_loss(*tensors).loss, fullgraph=True)
    losses = [compiled(*arguments), llds_loss(*arguments).loss]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, arguments[0])[0] for loss in losses))
