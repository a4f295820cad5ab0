"""The LM head and the loss of a causal LM, so that a training step forms no logits.

Every family's own `forward` stays as it is, whatever it does around the head: `lm_head` defers its logits, and the
model's `loss_function` runs the vocabulary schedule on them. Where the logits had to be formed after all, the model's
own loss follows: exact, but unbounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_longmoe.config import VocabConfig
from hf_longmoe.integrations.transformers.deferred import DeferredLogits, current_call, defer
from hf_longmoe.integrations.transformers.ring_head import gathered_until_backward, keeps_gathered
from hf_longmoe.integrations.transformers.token_values import asked
from hf_longmoe.integrations.transformers.tp_head import Divided, stock_forward
from hf_longmoe.schedules.vocab import linear_cross_entropy, ring_tile, tile_rows

__all__ = [
    "TiledLoss",
    "head_forward",
    "head_report",
    "head_rows",
    "is_patched",
    "patch_head",
    "restore_head",
    "ring_rows",
]


def head_rows(model: PreTrainedModel, lm_head: nn.Linear, config: VocabConfig, rank: int = 0) -> int:
    """
    Tokens of a tile outside of autocast; `rank` of what adapters add to the head.

    Raises:
        `ValueError`: not even the smallest tile fits the budget; for a float32 head also under autocast, which takes
            more and is chosen only after the patch.
    """
    weight = lm_head.weight
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None

    def rows(dtype: torch.dtype) -> int:
        bias = lm_head.bias is not None
        vocab_size, hidden_size = weight.shape
        return tile_rows(config.budget, vocab_size, hidden_size + rank, dtype=dtype, keep_logits=capped, bias=bias)

    if weight.dtype == torch.float32:
        try:
            rows(torch.bfloat16)  # of all dtypes that autocast may choose
        except ValueError as error:
            raise ValueError(f"{error} (Under autocast, in which a float32 model may run.)") from None
    return rows(weight.dtype)


def ring_rows(model: PreTrainedModel, lm_head: nn.Linear, config: VocabConfig) -> int:
    """Tokens, and vocabulary entries, of a block of the ring; raises as `head_rows` does."""
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    return ring_tile(config.budget, lm_head.weight.shape[1], dtype=lm_head.weight.dtype, keep_logits=capped)


def head_report(model: PreTrainedModel, lm_head: nn.Module) -> str | None:
    """Why the schedule cannot take this head's loss over; `None` if it can."""
    if not isinstance(lm_head, nn.Linear):
        return f"it is a {type(lm_head).__name__}, not an nn.Linear"
    if type(lm_head).forward is not nn.Linear.forward:
        return f"{type(lm_head).__name__} has a forward of its own"
    loss = model.loss_function
    loss = loss.stock if isinstance(loss, TiledLoss) else loss
    if loss is not ForCausalLMLoss:
        return f"its loss is {getattr(loss, '__name__', loss)}, not ForCausalLMLoss"
    return None


@dataclass(frozen=True)
class HeadSettings:
    """
    Arguments:
        gathered: FSDP2 keeps the gathered weight until backward.
        divided: where tensor parallelism divides the head, the ranks.
        stock: the forward that Transformers has given it then.
    """

    gathered: bool
    divided: Divided | None
    stock: Callable | None


def patch_head(
    model: PreTrainedModel, heads: Sequence[nn.Linear], config: VocabConfig, divided: Divided | None
) -> None:
    """`heads`: one, or with an adapter library's copies of it."""
    for lm_head in heads:
        lm_head.longmoe_head = HeadSettings(gathered_until_backward(model, lm_head), divided, stock_forward(lm_head))
        lm_head.forward = MethodType(head_forward, lm_head)
    model.loss_function = TiledLoss(config, model.loss_function, vars(model).get("_loss_function"))


def is_patched(model: PreTrainedModel) -> bool:
    """Whether its LM head, or what an adapter wraps there, is one that `patch_head` has patched."""
    return any("longmoe_head" in vars(module) for module in model.get_output_embeddings().modules())


def restore_head(model: PreTrainedModel) -> None:
    for module in model.modules():  # PEFT's `modules_to_save` makes copies
        if (adapters := vars(module).get("longmoe_head_adapters")) is not None:
            adapters.remove()
        settings: HeadSettings | None = vars(module).pop("longmoe_head", None)
        # Where something else has been put there since (TRL's `cast_lm_head_to_fp32`), that stays.
        if settings is not None and getattr(vars(module).get("forward"), "__func__", None) is head_forward:
            del module.forward
            if settings.stock is not None:
                module.forward = settings.stock
    loss = vars(model).get("_loss_function")
    if isinstance(loss, TiledLoss):
        del model._loss_function
        if loss.set_before is not None:
            model.loss_function = loss.set_before


@torch.compiler.disable
def head_forward(self: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    """A patched head's: deferred logits where a loss is computed."""
    call, settings = current_call(), vars(self).get("longmoe_head")
    if settings is None:  # by somebody's wrapper, which has outlived the patch
        return type(self).forward(self, hidden_states)
    gathered = settings.gathered or keeps_gathered(self)
    if call is not None and (reason := _not_deferred(self, hidden_states)):
        call.fallback, call = reason, None
    if call is None:
        return type(self).forward(self, hidden_states) if settings.stock is None else settings.stock(hidden_states)
    if settings.divided is None:
        return defer(call, hidden_states, self.weight, self.bias, gathered=gathered)
    parts = self.weight.to_local(), None if self.bias is None else self.bias.to_local()
    more = dict(ring=settings.divided, vocab_size=self.weight.shape[0], gathered=gathered)
    return defer(call, hidden_states, *parts, **more)


def _not_deferred(lm_head: nn.Linear, hidden_states: torch.Tensor) -> str | None:
    """Why the logits have to be formed, which shows only once the head is called."""
    settings = lm_head.longmoe_head
    if isinstance(lm_head, FSDPModule) and not (settings.gathered or keeps_gathered(lm_head)):
        return "FSDP2 frees the gathered weight before the loss"
    if settings.divided is None:
        return "it is sharded" if isinstance(lm_head.weight, DTensor) else None
    if isinstance(hidden_states, DTensor):
        return "its hidden states are divided over the tensor-parallel ranks"
    if [placement.is_shard(0) for placement in lm_head.weight.placements] != [True]:
        return "it is divided in another way than its tensor-parallel plan says"
    return None


class TiledLoss:
    """
    `model.loss_function`: the vocabulary schedule on deferred logits, the model's own loss on any other.

    Arguments:
        config: budget, label smoothing and z-loss.
        stock: the model's own loss, `ForCausalLMLoss`.
        set_before: what the instance had as its `_loss_function`, if anything.
    """

    def __init__(self, config: VocabConfig, stock: Callable, set_before: Callable | None = None) -> None:
        self.config, self.stock, self.set_before = config, stock, set_before

    @torch.compiler.disable
    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `ForCausalLMLoss`, which shifts `labels` unless `shift_labels` are given."""
        config, call = self.config, current_call()
        if call is not None:
            call.loss_computed = True
        if (tokens := asked()) is not None:
            if shift_labels is None:
                shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            return tokens.answer(config, logits, shift_labels, num_items_in_batch, ignore_index)
        deferred = isinstance(logits, DeferredLogits)
        if deferred and not (logits.ready and logits.shape[-1] == vocab_size):
            logits, deferred = logits.formed("loss_function"), False
        if not deferred and not (config.label_smoothing or config.z_loss):
            options = dict(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
            return self.stock(logits, labels, vocab_size, **options, **kwargs)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if shift_labels.numel() != logits.shape[:-1].numel():
            raise ValueError(
                f"labels have shape {tuple(shift_labels.shape)}, but there are logits for {tuple(logits.shape[:-1])}"
                " tokens; give one label a token (and no logits_to_keep)."
            )
        if not deferred:
            return _formed_loss(config, logits, shift_labels.reshape(-1), num_items_in_batch, ignore_index)
        hidden, weight, bias, low_rank = logits.source.parts()
        labels = shift_labels.reshape(hidden.shape[:-1])
        options = dict(
            budget=config.budget,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
            transform=logits.steps.transform,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
        )
        if logits.source.ring is not None:
            return logits.source.ring.loss(hidden, weight, bias, labels, **options)
        options |= dict(bias=bias, low_rank=low_rank, vocab_size=logits.shape[-1])
        return linear_cross_entropy(hidden, weight, labels, **options)


def _formed_loss(
    config: VocabConfig,
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None,
    ignore_index: int,
) -> torch.Tensor:
    """The stock loss with label smoothing and z-loss, which it lacks; as `linear_cross_entropy`, on formed logits."""
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels = labels.to(logits.device)
    valid = labels != ignore_index
    smoothing = config.label_smoothing
    total = nn.functional.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing
    )
    if config.z_loss:
        total = total + config.z_loss * (logits.logsumexp(-1).square() * valid).sum()
    if num_items is None:
        return total / valid.sum().clamp(min=1)
    return total / (num_items.to(total.device) if torch.is_tensor(num_items) else num_items)
