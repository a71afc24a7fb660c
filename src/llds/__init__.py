"""llds keeps tool-using GRPO runs from collapsing. Importing it imports torch and nothing heavier."""

from llds._version import __version__
from llds.objective import LLDSOutput, llds_loss

__all__ = ["LLDSOutput", "__version__", "llds_loss"]
