"""Settings of the process that must stand before the Hugging Face libraries are imported, and their
silencing.
"""

from __future__ import annotations

import logging
import os
import warnings


def prepare_environment() -> None:
    """Keep the Hugging Face libraries offline, without telemetry, and quiet. Call it before importing them.

    ``HF_HUB_OFFLINE=0`` in the environment lets models be downloaded.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def is_offline() -> bool:
    """Say whether models may not be downloaded: always, unless ``HF_HUB_OFFLINE=0`` is in the environment."""
    return os.environ.get("HF_HUB_OFFLINE", "1") != "0"


def silence_libraries() -> None:
    """Turn off the libraries' progress bars, advice and warnings; what LLDS has to say is shown."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for name in ("trl", "accelerate", "datasets", "torch.distributed", "llds.engines.trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|trl|accelerate|datasets|peft)(\.|$)")
