"""What a trainer asks of a model in place of logits: each label's log-probability, entropy and the like, in tiles.

A caller opens `asking(TokenCall(...))` around a call of a patched model with labels. The model's own forward runs,
with whatever it does to its logits, up to `loss_function`, which answers: `TokenCall.values`, and their negative mean
as the model's loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from hf_longmoe.config import VocabConfig
from hf_longmoe.integrations.transformers.deferred import DeferredLogits
from hf_longmoe.schedules.vocab import LogitTransform, TokenStatistics, token_statistics

__all__ = ["TokenCall", "asked", "asking"]


@dataclass
class TokenCall:
    """
    Arguments:
        fields: which of the optional fields of `TokenStatistics`.
        temperature: what the logits are divided by.
        float32: the projection runs in float32, outside of autocast.
        values: the answer, `[batch, sequence]`; the last position of each sequence has no label, and is zero, unless
            the labels were shifted already.
    """

    fields: tuple[str, ...]
    temperature: float = 1.0
    float32: bool = False
    values: TokenStatistics | None = None

    def answer(
        self,
        config: VocabConfig,
        logits: torch.Tensor,
        labels: torch.Tensor,
        num_items: torch.Tensor | int | None,
        ignore_index: int,
    ) -> torch.Tensor:
        """
        Arguments:
            logits: `[..., V]`, deferred or formed; `labels`: shifted, one for each.

        Returns:
            The loss of these labels: the sum divided by `num_items`, or by their number.

        Raises:
            `ValueError`: the config has label smoothing or z-loss, which a loss made of log-probabilities lacks.
        """
        if config.label_smoothing or config.z_loss:
            raise ValueError(
                f"vocab.label_smoothing={config.label_smoothing} and vocab.z_loss={config.z_loss} cannot be applied:"
                " this trainer makes its loss of log-probabilities; set both to 0."
            )
        labels = labels.reshape(logits.shape[:-1])
        # A padded vocabulary's cut is known to the loss alone.
        if isinstance(logits, DeferredLogits) and logits.ready and not logits.steps.cut:
            values = self._in_tiles(config.budget, logits, labels, ignore_index)
        else:
            logits = logits.formed("loss_function") if isinstance(logits, DeferredLogits) else logits
            values = self._of_formed(logits, labels.to(logits.device), ignore_index)
        if self.values is None:  # the first loss is that of the next token; a model may add others
            self.values = values
        if num_items is None:
            num_items = (labels != ignore_index).sum().clamp(min=1)
        elif torch.is_tensor(num_items):
            num_items = num_items.to(values.log_probs.device)
        return -values.log_probs.sum() / num_items

    def _in_tiles(
        self, budget: int | str, logits: DeferredLogits, labels: torch.Tensor, ignore_index: int
    ) -> TokenStatistics:
        source, transform = logits.source, logits.steps.transform
        hidden, weight, bias, low_rank = source.parts()
        if source.ring is not None:
            # A loss goes round the ring, single tokens do not: each rank has all of the weight.
            weight, bias = (None if part is None else source.ring.gathered(part) for part in (weight, bias))
        options: dict[str, Any] = dict(fields=self.fields, budget=budget, ignore_index=ignore_index)
        softcap = None if transform.softcap is None else transform.softcap / self.temperature
        options["transform"] = LogitTransform(transform.scale / self.temperature, softcap)
        if not self.float32 or hidden.dtype == torch.float64:
            return token_statistics(hidden, weight, labels, bias=bias, low_rank=low_rank, **options)
        hidden, weight, bias = (None if t is None else t.float() for t in (hidden, weight, bias))
        low_rank = None if low_rank is None else tuple(factor.float() for factor in low_rank)
        with torch.autocast(hidden.device.type, enabled=False):
            return token_statistics(hidden, weight, labels, bias=bias, low_rank=low_rank, **options)

    def _of_formed(self, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> TokenStatistics:
        """The same of logits that had to be formed: exact, but unbounded."""
        valid = labels != ignore_index
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        log_p = logits.log_softmax(-1)
        values = {"log_probs": log_p.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)}
        if "entropy" in self.fields:
            values["entropy"] = -(log_p.exp() * log_p).sum(-1)
        with torch.no_grad():
            if "mean_logits" in self.fields:
                values["mean_logits"] = logits.mean(-1)
            if "log_sum_squares" in self.fields:
                values["log_sum_squares"] = (2 * log_p).logsumexp(-1)
            if "correct" in self.fields:
                values["correct"] = logits.argmax(-1) == labels
        return TokenStatistics(**{name: value.masked_fill(~valid, 0) for name, value in values.items()})


_asked: ContextVar[TokenCall | None] = ContextVar("hf_longmoe_token_call", default=None)


def asked() -> TokenCall | None:
    """What is asked of the call that this thread is in."""
    return _asked.get()


@contextlib.contextmanager
def asking(call: TokenCall) -> Iterator[TokenCall]:
    token = _asked.set(call)
    try:
        yield call
    finally:
        _asked.reset(token)
