"""Where converted and warm-started models are kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return the cache folder: ``$LLDS_CACHE``, else ``llds`` in the user's cache folder. It may not exist
    yet.
    """
    own = os.environ.get("LLDS_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llds"


def fingerprint(content: Any) -> str:
    """Return twelve hex digits that tell apart JSON-like contents, for names in the cache."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
