"""Checks of arguments, each named by its keyword.

They look at shapes and Python numbers, never into a tensor: that would make the host wait for the device.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from llds.errors import LLDSError


def check_shape(like: str, shape: torch.Size, **tensors: Tensor) -> None:
    """Raise ``LLDSError`` for a tensor that has not the ``shape`` of the one called ``like``."""
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise LLDSError(
                f"{name} must have the shape of {like}, {list(shape)}, but has {list(tensor.shape)}."
            )


def check_choice(allowed: Collection[str | None], **options: str | None) -> None:
    """Raise ``LLDSError`` for an option that is not among the ``allowed`` ones."""
    for name, value in options.items():
        if value not in allowed:
            raise LLDSError(f"{name} must be one of {', '.join(map(repr, allowed))}, but is {value!r}.")


def check_least(bound: float, **numbers: float | Tensor | None) -> None:
    """Raise ``LLDSError`` for a number below ``bound``, or NaN."""
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and not value >= bound:
            raise LLDSError(f"{name} must be at least {bound:g}, but is {value}.")


def check_above(bound: float, **numbers: float | Tensor | None) -> None:
    """Raise ``LLDSError`` for a number not above ``bound``, or NaN."""
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and not value > bound:
            raise LLDSError(f"{name} must be above {bound:g}, but is {value}.")
