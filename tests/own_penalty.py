"""A GRPO trainer with a penalty written by hand, right or with one mistake, as people write them."""

import torch
from trl import GRPOTrainer


def make_class(mistake="", gate="action", beside=False):
    """Return a trainer class whose loss has LLDS in it, λ = 0.2 and N = all policy tokens of the step."""

    class Own(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.kept = result[0]
            return result

        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if mistake == "never called":
                return loss
            new = self.kept
            if beside:
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                logits = model(input_ids=ids).logits[:, -new.shape[1] - 1 : -1].log_softmax(-1)
                new = logits.gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)
            penalty = self.penalty(new, inputs)
            self.log_it(penalty)
            return loss + penalty * (2 if mistake == "twice" else 1)

        def log_it(self, penalty):
            if mistake == "last only" and not self.accelerator.sync_gradients:
                return
            self._metrics["train"]["penalty"].append(float(penalty.detach()))
            if mistake != "bare":
                self._metrics["train"]["is_structural"].append(1.0)

        def penalty(self, new, inputs):
            old = inputs.get("old_per_token_logps", new.detach())
            if mistake == "itself":
                old = new.detach()
            if mistake == "reference":
                old = inputs["ref_per_token_logps"]
            if mistake == "absent is 0":
                old = inputs.get("old_per_token_logps", torch.zeros_like(new))
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            if mistake == "mask of ones":
                mask = torch.ones_like(mask)
            if mistake == "no feedback mask":
                mask = inputs["completion_mask"]
            advantages = inputs["advantages"].unsqueeze(1)
            preserved = {"positive only": advantages > 0, "all": advantages > -99}.get(
                mistake, advantages >= -1e-3
            )
            drop = old - (new.detach() if mistake == "detached" else new)
            penalised = drop.relu() * mask * preserved * self.open_gates(drop.detach() * mask, mask)
            count = inputs["num_items_in_batch"] * self.current_gradient_accumulation_steps
            count = count / self.args.steps_per_generation
            if mistake == "sum":
                count = 1
            if mistake == "micro-batch":
                count = mask.sum()
            return 0.2 * penalised.sum() / count

        def open_gates(self, drop, mask):
            if gate == "token":
                return torch.ones_like(drop)
            if gate == "response":
                return (drop.sum(1, keepdim=True) > 0).float()
            opened = torch.zeros_like(drop)
            for row in range(len(drop)):
                start = None
                for i in range(drop.shape[1] + 1):
                    inside = i < drop.shape[1] and mask[row, i] > 0
                    if inside and start is None:
                        start = i
                    if not inside and start is not None:
                        opened[row, start:i] = float(drop[row, start:i].sum() > 0)
                        start = None
            return opened

    return Own
