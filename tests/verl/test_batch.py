"""What the loss reads beyond its arguments, in the layouts of verl's two trainers."""

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from llds.engines.verl import batch
from llds.errors import LLDSError

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.fixture
def exposed():
    data = TensorDict({"response_mask": MASK}, batch_size=[3])
    token = batch._current.set(data)
    yield data
    batch._current.reset(token)


def test_answers_in_extra_fields(exposed):
    told = {"llds_answer_span": (1, 3), "llds_valid_searches": 2}
    none = {"llds_answer_span": None, "llds_valid_searches": 0}
    # verl pads with rows without a token, that keep what the first real one said.
    exposed["extra_fields"] = NonTensorStack(told, none, told)
    mask, searches = batch.answers(MASK)
    assert (mask & MASK).tolist() == [[False, True, True, False, False], [False] * 5, [False] * 5]
    assert searches == [2, 0]


def test_answers_in_fields_of_their_own(exposed):
    exposed["llds_answer_span"] = NonTensorStack((1, 3), None, None)
    exposed["llds_valid_searches"] = NonTensorStack(2, 1, 0)
    mask, searches = batch.answers(MASK)
    assert mask.sum() == 2
    assert searches == [2, 1]


def test_an_agent_loop_that_says_nothing(exposed):
    with pytest.raises(LLDSError, match="llds_answer_weight needs llds_answer_span and llds_valid_searches"):
        batch.answers(MASK)
    exposed["extra_fields"] = NonTensorStack({}, {}, {})
    with pytest.raises(LLDSError, match="as the agent loop of"):
        batch.answers(MASK)


def test_the_reference_comes_nested_or_padded(exposed):
    with pytest.raises(LLDSError, match="use_kl_loss=True only"):
        batch.reference_logprobs(MASK)
    rows = [torch.ones(3), torch.ones(5), torch.ones(1)]
    exposed["ref_log_prob"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found = batch.reference_logprobs(MASK)
    assert found.shape == MASK.shape
    assert found.sum() == 9
    exposed["ref_log_prob"] = found
    assert torch.equal(batch.reference_logprobs(MASK), found)
