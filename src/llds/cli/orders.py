"""What a command line of ``llds eval`` asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from llds.errors import LLDSError
from llds.evaluation.contestants import ONE_SHOT, Baseline
from llds.search.sampling import Sampling

EngineName: TypeAlias = Literal["transformers", "openai", "vllm"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

# Episodes as the paper evaluates them (arXiv 2512.04220); the prompt may still be the instruct one.
SEARCH_R1 = (
    "episode.prompt=search-r1",
    "episode.max_turns=4",
    "episode.max_prompt=2048",
    "episode.max_action=500",
    "episode.max_observation=500",
    "episode.max_response=4096",
    "episode.passage_words=0",
    "retrieval.topk=3",
)


@dataclass(frozen=True)
class Order:
    """What the command line asks for; see ``llds eval --help``."""

    model: str
    overrides: tuple[str, ...] = ()
    split: str | None = None
    questions: str | None = None
    benchmarks: str | None = None
    only: tuple[str, ...] = ()
    retriever: str | None = None
    no_retriever: bool = False
    corpus_name: str | None = None
    search_r1: bool = False
    baselines: tuple[Baseline, ...] = ()
    engine: EngineName = "transformers"
    url: str | None = None
    served_model: str | None = None
    concurrency: int = 32
    samples: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0
    out: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise LLDSError(f"--samples is {self.samples}: give at least 1.")
        if self.samples > 1 and not self.sampling.temperature:
            raise LLDSError(
                "Greedy answers to one question are all alike: give --samples a --temperature too."
            )
        if self.engine == "openai" and self.url is None:
            raise LLDSError("--engine openai needs the server's address: --url http://127.0.0.1:8000/v1.")
        if self.engine != "openai" and (self.url or self.served_model):
            raise LLDSError("--url and --served-model are for a server: add --engine openai.")
        if self.retriever and self.no_retriever:
            raise LLDSError("--retriever and --no-retriever exclude each other: give one of them.")
        if self.no_retriever and ONE_SHOT in self.baselines:
            raise LLDSError("The baseline one-shot searches once: take --no-retriever away.")

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn: greedily, unless told otherwise."""
        return Sampling(temperature=self.temperature or 0.0, top_p=self.top_p)

    @property
    def all_overrides(self) -> list[str]:
        """The settings that differ from the model's own; what is named last wins."""
        preset = SEARCH_R1 if self.search_r1 else ()
        return [*preset, *_retrieval_overrides(self.retriever), *self.overrides]


def _retrieval_overrides(retriever: str | None) -> list[str]:
    if retriever is None:
        return []
    if retriever.startswith(("http://", "https://")):
        return [f"retrieval.url={retriever}"]
    return ["retrieval.url=null", f"retrieval.corpus={retriever}"]
