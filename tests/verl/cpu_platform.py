"""A processor as a platform of verl, so that its real training worker runs without an accelerator.

Registered through verl's own registries. Import it before anything of verl asks for the platform, with
``VERL_PLATFORM=cpu`` in the environment.
"""

from __future__ import annotations

import types
from contextlib import contextmanager

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(types.ModuleType):
    """``torch.cpu``, and what only accelerators have: memory that is never used, states that are torch's."""

    get_rng_state = staticmethod(lambda *args: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *args: torch.set_rng_state(state))
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: "cpu")
    mem_get_info = staticmethod(lambda *args: (0, 0))
    get_device_name = staticmethod(lambda *args: "cpu")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *args, **kwargs: 0)


_DEVICE = _Device("llds_cpu_device")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE)

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def get_device_capability(self, device_index=0):
        return None, None

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def _nothing(self, *args):
        return None

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing


def register_engine():
    """Let verl's FSDP engine run on this platform."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
        FSDPEngineWithLMHead
    )
