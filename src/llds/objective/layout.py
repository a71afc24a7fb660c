"""One flat axis for padded and packed batches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llds.errors import LLDSError
from llds.objective import spans
from llds.objective.checks import check_shape


@dataclass
class Layout:
    """Where the policy's tokens and the responses lie among the N tokens of a batch.

    ``mask`` (bool [N]) marks the tokens that the policy wrote, ``starts`` (bool [N]) the first token of every
    response. ``dtype`` is what is computed in: float64 for float64 log-probs, float32 for all others.
    """

    shape: torch.Size
    dtype: torch.dtype
    mask: Tensor
    starts: Tensor
    segment_ids: Tensor | None

    @classmethod
    def of(cls, logprobs: Tensor, response_mask: Tensor, segment_ids: Tensor | None = None) -> "Layout":
        """Read the layout of padded ``logprobs`` [B, T], or of packed ones [..., N] with ``segment_ids``.

        Raises ``LLDSError`` when the log-probs are not floating point, the shapes differ, or a batch is
        neither padded nor has segment ids.
        """
        if not logprobs.is_floating_point():
            raise LLDSError(f"logprobs must be floating point, but is {logprobs.dtype}.")
        check_shape("logprobs", logprobs.shape, response_mask=response_mask)
        if segment_ids is not None:
            check_shape("logprobs", logprobs.shape, segment_ids=segment_ids)
            if segment_ids.is_floating_point() or segment_ids.dtype == torch.bool:
                raise LLDSError(f"segment_ids must be integers, but is {segment_ids.dtype}.")
            starts = spans.segment_starts(segment_ids)
        elif logprobs.dim() == 2:
            starts = spans.row_starts(logprobs.shape, logprobs.device)
        else:
            raise LLDSError(
                f"logprobs must be padded, [B, T], but has shape {list(logprobs.shape)}; for packed tokens "
                "also pass segment_ids, integers of the same shape that number the responses."
            )
        dtype = torch.promote_types(logprobs.dtype, torch.float32)
        return cls(logprobs.shape, dtype, response_mask.bool().flatten(), starts, segment_ids)

    def tokens(self, **values: Tensor) -> Tensor:
        """Flatten one named tensor to [N], with 0 where the policy did not write, whatever stood there."""
        check_shape("logprobs", self.shape, **values)
        (tensor,) = values.values()
        # A product with the mask would let NaN through, also into the gradient; filling in does not.
        return tensor.flatten().to(self.dtype).masked_fill(~self.mask, 0)

    def flags(self, **masks: Tensor) -> Tensor:
        """Flatten one named mask to bool [N], limited to the policy's tokens."""
        check_shape("logprobs", self.shape, **masks)
        (mask,) = masks.values()
        return mask.bool().flatten() & self.mask

    def advantages(self, values: Tensor) -> Tensor:
        """Spread advantages per response ([B], [B, 1]; packed [S]) or per token to [N]; no gradient."""
        values = values.detach()
        if values.shape == self.shape:
            return self.tokens(advantages=values)
        given = list(values.shape)
        if self.segment_ids is not None:
            if values.dim() != 1:
                raise LLDSError(
                    f"advantages must be one per token, {list(self.shape)}, or one per segment, [S], "
                    f"but has shape {given}."
                )
            # The id of a padding token may point nowhere, so it is never followed.
            policy_ids = self.segment_ids.masked_fill(~self.mask.view(self.shape), 0)
            return self.tokens(advantages=values[policy_ids.long()])
        rows, length = self.shape
        if given not in ([rows], [rows, 1]):
            raise LLDSError(
                f"advantages must have shape [{rows}], [{rows}, 1] or [{rows}, {length}] beside logprobs "
                f"[{rows}, {length}], but has {given}."
            )
        return self.tokens(advantages=values.reshape(rows, 1).expand(rows, length))

    @property
    def responses(self) -> Tensor:
        """Number of the response that each policy token belongs to: long [N], 0 for the other tokens."""
        return spans.response_ids(self.mask, self.starts)


def nan_where(bad: Tensor, values: Tensor) -> Tensor:
    """Return 0, or NaN where ``bad`` with a NaN gradient to ``values``: a fault must not pass for a zero."""
    return values.masked_fill(~bad, 0) * torch.zeros_like(values).masked_fill(bad, torch.nan)
