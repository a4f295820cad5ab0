"""Ranks that share the sequences of one model: each forward with labels computes this rank's part of them."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from ringmaster.config import Backend, RingmasterConfig
from ringmaster.runtime import CPRuntime
from torch import distributed, nn
from transformers import PreTrainedModel

from hf_longmoe.integrations.ringmaster.attention import SequenceAttention
from hf_longmoe.integrations.ringmaster.batch import PROBLEMS, fingerprint, part_of
from hf_longmoe.integrations.ringmaster.models import check_shareable
from hf_longmoe.integrations.transformers.causal_lm import causal_lm
from hf_longmoe.integrations.transformers.checkpoint_function import checkpointing_of, wrap_checkpointing
from hf_longmoe.integrations.transformers.forward import wants_router_loss
from hf_longmoe.schedules.wire import GroupWire

__all__ = ["SharedSequences"]


class SharedSequences:
    """
    From here until `remove()`, a forward of `model` with labels takes the whole batch, the same on all ranks of a
    group, and computes this rank's part of each sequence: see `part_of` for what the parts are.

    - In training, the loss is the part's: the sum over its labels, divided by `num_items_in_batch`. Gradients that
      are averaged over all ranks (DDP, FSDP2) are right as they are without `num_items_in_batch`: those of the mean
      over groups of their mean losses. With it, give the labels of all groups and micro-batches of the step, each
      once, and multiply the loss by the number of ranks, as the Trainer does.
    - In evaluation, the loss is the mean over the group: every rank has that of the whole sequences. The logits are
      the part's.
    - Without labels, in evaluation and `generate`, each rank computes the whole by itself. Refused in training.

    Arguments:
        model: it is not kept alive.
        group: the process group of ranks that share sequences.
        entered: the module that is called for the model, if another: PEFT's calls `forward` and not the model.

    Raises:
        `ValueError`: the model cannot be shared, see `check_shareable`; nothing is changed then.
    """

    def __init__(
        self, model: PreTrainedModel, group: distributed.ProcessGroup, entered: nn.Module | None = None
    ) -> None:
        check_shareable(model, group.size())
        self.wire, self.everyone = GroupWire(group), GroupWire(distributed.group.WORLD)
        self.groups = self.everyone.gather(_ranks(group, next(model.parameters()).device))
        config = RingmasterConfig(group.size(), Backend.ULYSSES, ulysses_size=group.size(), ring_size=1)
        self._runtime = CPRuntime(config, ulysses_group=group, cp_group=group)
        self._attention = SequenceAttention(model.config._attn_implementation)
        weakref.finalize(model, self._attention.close)
        model.set_attn_implementation(self._attention.name)
        entered = model if entered is None else entered
        self._handles = [
            entered.register_forward_pre_hook(self._divide, with_kwargs=True),
            entered.register_forward_hook(self._join, always_call=True),
        ]
        self._layers = model.config.num_hidden_layers
        self.inside = False  # whether a shared forward is running
        model.longmoe_sequences = self
        self._know_replay(model, True)

    def remove(self, model: PreTrainedModel) -> None:
        """Not between a forward and its backward."""
        for handle in self._handles:
            handle.remove()
        model.set_attn_implementation(self._attention.kernel)
        self._attention.close()
        del model.longmoe_sequences
        self._know_replay(model, False)

    def __deepcopy__(self, memo: dict) -> SharedSequences:
        """A copy of the model is shared by the same ranks."""
        return self

    def _know_replay(self, model: PreTrainedModel, on: bool) -> None:
        settings = checkpointing_of(model)
        settings.shared = on  # its attention has to know which forward it replays
        wrap_checkpointing(model, settings)

    @torch.compiler.disable
    def _divide(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        inputs = _by_name(module, args, kwargs)
        training = module.training and torch.is_grad_enabled()
        if not training and inputs.get("labels") is None and inputs.get("shift_labels") is None:
            return args, kwargs
        self._check_router_loss(causal_lm(module), inputs)
        self._check(inputs, training)
        part, packed = part_of(inputs, self.wire.rank, self.wire.size)
        runtime = CPRuntime(**{**vars(self._runtime), "varlen": packed})
        self._attention.begin(runtime)
        self.inside = True
        return (), part

    def _check_router_loss(self, model: PreTrainedModel, inputs: dict[str, Any]) -> None:
        patch = vars(model).get("longmoe")
        streamed = patch is not None and patch.router_loss is not None
        if not streamed and hasattr(model, "router_aux_loss_coef") and wants_router_loss(model, inputs):
            raise ValueError(
                f"ParallelismConfig.cp_size={self.wire.size}: {type(model).__name__} would compute its router's"
                " auxiliary loss of each rank's part alone; patch_model(model) has it computed of whole sequences, or"
                " set output_router_logits=False."
            )

    def _check(self, inputs: dict[str, Any], training: bool) -> None:
        """Every rank raises, or none: in training all of them are here, in evaluation perhaps this group alone."""
        wire = self.everyone if training else self.wire
        found = wire.gather(fingerprint(inputs, self.wire.size))
        own = distributed.get_process_group_ranks(self.wire.group)
        found = dict(enumerate(found)) if training else dict(zip(own, found, strict=True))
        for rank, (problem, length, _) in found.items():
            if problem:
                raise ValueError(
                    f"ParallelismConfig.cp_size={self.wire.size}: the batch of rank {rank} cannot be divided:"
                    f" {PROBLEMS[problem].format(length=length)}."
                )
        for ranks in self.groups if training else [own]:
            if any(found[rank] != found[ranks[0]] for rank in ranks):
                raise ValueError(
                    f"Ranks {ranks} share their sequences (ParallelismConfig.cp_size={len(ranks)}) but were given"
                    " different batches; prepare the dataloader with the same Accelerator, which gives all of them the"
                    " same one (for an iterable dataset with DataLoaderConfiguration(dispatch_batches=False))."
                )

    @torch.compiler.disable
    def _join(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not self.inside:
            return None
        self.inside = False
        self._attention.end()
        if output is None:  # an exception is on its way
            return None
        if self._attention.calls < self._layers:
            raise ValueError(
                f"ParallelismConfig.cp_size={self.wire.size}: {self._attention.calls} of {self._layers} layers of"
                f" {type(module).__name__} have used Transformers' attention interface; the others would see a part of"
                " the sequence. Set cp_size to 1."
            )
        if module.training and torch.is_grad_enabled():
            return None
        loss = output["loss"] if isinstance(output, dict) else output[0]
        loss = self.wire.reduce(loss.detach().clone()).wait() / self.wire.size
        if isinstance(output, dict):
            output["loss"] = loss
            return output
        return (loss, *output[1:])


def _ranks(group: distributed.ProcessGroup, device: torch.device) -> torch.Tensor:
    return torch.tensor(distributed.get_process_group_ranks(group), device=device)


def _by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
    named = dict(list(bound.arguments.items())[1:])  # without self
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named
