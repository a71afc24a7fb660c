"""The processor as platform, verl's FSDP engine on it, and an inference engine that is a model of transformers."""

from __future__ import annotations

import hashlib
import os
from collections import Counter

import cpu_platform
import ray
import torch
import verl.utils.distributed as verl_distributed
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from llds.search.decoding import Decoder
from llds.search.sampling import GREEDY, Sampling, draw_uniform, sample
from llds.search.tokens import TokenText, eos_ids, pad_id

NAME = "cpu"
_SERVER = "llds_cpu_server"

cpu_platform.register_engine()

_original = verl_distributed.initialize_global_process_group_ray


def _gloo(timeout_second=None, backend=None):
    # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
    return _original(timeout_second, backend or "gloo")


verl_distributed.initialize_global_process_group_ray = _gloo


class Server:
    """Writes actions token by token. All replicas share one, so that a run is the same for one worker and for two.

    What is drawn depends on the weights' version, on the tokens before, and on how often just these came.
    """

    def __init__(self, path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.pad = pad_id(tokenizer)
        self.eos = eos_ids(self.model, tokenizer)
        self.text = TokenText(tokenizer)
        self.version = 0
        self.seen = Counter()

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others):
        ids = list(prompt_ids)
        self.seen[tuple(ids)] += 1
        key = f"{self.version} {self.seen[tuple(ids)]} {ids}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        temperature = sampling_params["temperature"]
        sampling = Sampling(temperature) if temperature else GREEDY
        written, logprobs = [], []
        with torch.no_grad():
            decoder = Decoder(self.model, self.pad)
            logits = decoder.start([ids])
            while True:
                token, logprob = sample(logits, sampling, draw_uniform(1, generator))
                written.append(int(token))
                logprobs.append(float(logprob))
                if len(written) >= sampling_params["max_tokens"] or self._ends(written):
                    break
                logits = decoder.step(token, [0])
        return TokenOutput(
            token_ids=written,
            log_probs=logprobs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )

    def _ends(self, written):
        return written[-1] in self.eos or self.text.completes_tag(written)

    async def load_weights(self, weights, version):
        self.model.load_state_dict(weights, strict=True)
        self.version = version or 0
        self.seen.clear()

    async def nothing(self, *args, **kwargs):
        return None

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = set_global_steps = nothing


class Replica(RolloutReplica):
    async def launch_servers(self):
        options = {"name": _SERVER, "get_if_exists": True, "num_cpus": 0, "max_concurrency": 100}
        server = ray.remote(Server).options(**options).remote(self.model_config.path)
        await server.nothing.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"cpu:{self.replica_rank}"


class Adapter(BaseRollout):
    """The side of the training worker, which sends its weights."""

    def __init__(self, config, model_config, device_mesh, **others):
        super().__init__(config, model_config, device_mesh)
        self.sleep_level = 2

    async def resume(self, tags):
        return None

    async def release(self):
        return None

    async def update_weights(self, weights, global_steps=None, **others):
        # All ranks gather; the first one sends.
        gathered = {name: tensor.detach().float().clone() for name, tensor in weights}
        if os.environ["RANK"] == "0":
            await ray.get_actor(_SERVER).load_weights.remote(gathered, global_steps)


RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = "support.cpu_trainer.Adapter"
