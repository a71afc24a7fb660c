import pytest


@pytest.fixture
def restored_registry():
    """verl's registry of policy losses, put back afterwards."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    before = dict(POLICY_LOSS_REGISTRY)
    yield POLICY_LOSS_REGISTRY
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(before)
