"""`OffloadStreamAdamW`: the optimizer that a training loop sees."""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from hf_longmoe.config import OptimizerConfig
from hf_longmoe.schedules.host import Engine
from hf_longmoe.schedules.optimizer.arena import Entry
from hf_longmoe.schedules.optimizer.book import Book
from hf_longmoe.schedules.optimizer.checks import check_adamw, check_caps, check_groups, check_hyperparameters
from hf_longmoe.schedules.optimizer.loading import SHARE, matched, plain, update_groups
from hf_longmoe.schedules.optimizer.record import Record, Timings

__all__ = ["OffloadStreamAdamW"]

logger = logging.getLogger(__name__)


class OffloadStreamAdamW(torch.optim.Optimizer):
    """
    AdamW whose state lives in host memory, and whose step is a pipeline of buckets.

    The update is `torch.optim.AdamW(fused=True)`'s, on float32 masters where parameters are bfloat16 or float16. The
    device holds at most `slots * bucket` bytes of state, during `step()` alone. Nothing is made before the first step.
    `step()` does not wait for the device, except where the host computes; what is launched after it begins when the
    parameters are new. The state may still be on its way then: `state` and `state_dict()` wait for it.

    Of parameters on the host (FSDP2's `CPUOffloadPolicy`, or no accelerator) the state is beside them, and nothing is
    copied; likewise on the device where `update_on="auto"` and all of the state fits `slots * bucket`.

    Arguments:
        params: parameters, or groups, as every optimizer of torch takes them: float32, bfloat16, float16; DTensors are
            updated shard by shard.
        lr, betas, eps, weight_decay: of AdamW; read from the groups at each step. `lr` may be a tensor.
        bucket, slots, update_on, early_gradients: see `OptimizerConfig`. `update_on` of `"auto"` or `"both"` measures
            in the first step with an `lr` above 0, which is a collective of the default process group, if there is
            one; what it finds is kept in each group as `"accelerator_share"`, and is saved with it.
        engine (`Engine`, *optional*): the copies; found at the first step from the parameters' device.

    Attributes:
        timings (`Timings` or `None`): of the last step; waits for it.
        replaces (`torch.optim.AdamW` or `None`): whose place it has taken, see `from_adamw`.
        last_event (`torch.Event` or `None`): after it the parameters are new, for
            `FSDPModule.set_post_optim_event`. None where nothing is copied.

    Raises:
        `ValueError`: a hyperparameter or a cap is out of range.
        `RuntimeError`: from `step()`: it failed midway. The device has come to rest, the counters are those of what
            has been updated, and the message names what is half done.
        `MemoryError`: from `step()`, before anything is changed: the host cannot hold the state.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bucket: int | str = "64MiB",
        slots: int = 2,
        update_on: str = "auto",
        early_gradients: bool = False,
        engine: Engine | None = None,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        caps = OptimizerConfig(bucket=bucket, slots=slots, update_on=update_on, early_gradients=early_gradients)
        check_caps(caps)
        self._open(caps, engine)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, SHARE: None}
        super().__init__(params, defaults)

    @classmethod
    def from_adamw(cls, optimizer: torch.optim.AdamW, **caps: Any) -> OffloadStreamAdamW:
        """
        Takes a plain AdamW's place: the same `param_groups` (list and dicts, so that a scheduler made for it goes on
        working), hooks and state. The plain one loses its state.

        Arguments:
            optimizer (`torch.optim.AdamW`): not of a subclass.
            caps: `bucket`, `slots`, `update_on`, `early_gradients`, `engine`.

        Raises:
            `TypeError`: another class.
            `ValueError`: `amsgrad`, `maximize`, `foreach=True`, `capturable` or `differentiable`.
        """
        check_adamw(optimizer)
        names = ("lr", "betas", "eps", "weight_decay")
        streaming = cls(optimizer.param_groups, **{name: optimizer.defaults[name] for name in names}, **caps)
        streaming.param_groups, streaming.defaults = optimizer.param_groups, {**optimizer.defaults, SHARE: None}
        streaming._state.update(optimizer.state)
        optimizer.state = defaultdict(dict)
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(streaming, name, value)
        streaming.replaces = optimizer
        return streaming

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """
        Raises:
            `ValueError`: a hyperparameter is out of range, or a flag is not there.
        """
        given = {**self.defaults, **param_group}
        check_hyperparameters(given["lr"], given["betas"], given["eps"], given["weight_decay"])
        check_groups([*self.param_groups, param_group], type(self).__name__)
        super().add_param_group(param_group)

    def _open(self, caps: OptimizerConfig, engine: Engine | None) -> None:
        self._book = Book(caps, engine)
        self._caps = caps
        self._last: Record | None = None
        self._event: Any = None
        self.replaces: torch.optim.Optimizer | None = None
        self._hooks: dict[torch.Tensor, Any] = {}

    # -- the step -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """
        Updates the parameters that have a gradient.

        Arguments:
            closure (`Callable`, *optional*): computes the gradients; what it returns is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if vars(self).pop("found_inf", None) is not None:  # a GradScaler's, see _step_supports_amp_scaling
            vars(self).pop("grad_scale", None)
            raise RuntimeError(
                "early_gradients=True: a GradScaler divides gradients before step(), but they have left the device. "
                "Use early_gradients=False, or bfloat16, which needs no scaler."
            )
        begun = time.perf_counter()
        live = self._book.live(self.param_groups, self._state)
        record = Record(self._book.engine)
        try:
            self._event = self._book.update(live, self.param_groups, record)
            record.complete = True
        except BaseException as error:
            record.drain()
            raise self._failed(live, record, error) from error
        finally:
            self._book.end(live, record)
            record.step_seconds = time.perf_counter() - begun
            self._last = record
        if self.replaces is not None:
            self.replaces._opt_called = True  # its scheduler looks there
        if self._caps.early_gradients:
            self.arm()
        return loss

    @staticmethod
    def _failed(live: list[Entry], record: Record, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error
        whole = sum(record.whole(entry) for entry in live)
        broken = [entry.name for entry in live if record.half_done(entry)]
        told = f"Half done, so load a checkpoint: {', '.join(broken)}." if broken else "None is half done."
        return RuntimeError(
            f"OffloadStreamAdamW.step() failed: {str(error).rstrip('.')}. Of {len(live)} parameters {whole} are "
            f"updated, and their `step` has risen. {told}"
        )

    def synchronize(self) -> None:
        """The host waits for the last step's copies."""
        if self._last is not None:
            self._last.finish()

    def resync(self) -> None:
        """
        Says that parameters have changed without torch's knowledge (`p.data.copy_()`): masters are taken from them at
        the next step. Changes that count up `p._version` are noticed without it.
        """
        for entry in self._book.entries.values():
            entry.fresh, entry.trusted = True, False

    @property
    def timings(self) -> Timings | None:
        return None if self._last is None else self._last.timings()

    @property
    def last_event(self) -> torch.Event | None:
        return getattr(self._event, "end", None)

    # -- gradients during backward --------------------------------------------------------------------------------
    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks. With early gradients it is to come to `step()`, which tells why it cannot."""
        return self._caps.early_gradients

    def arm(self) -> None:
        """
        With `early_gradients`: gradients of the backward passes from here on travel down at once. `step()` does it.

        Gradient clipping finds no gradients then, and does nothing.

        Raises:
            `ValueError`: without `early_gradients`.
        """
        if not self._caps.early_gradients:
            raise ValueError("arm() is for early_gradients=True.")
        self._book.build(self.param_groups, self._state)
        this = weakref.ref(self)

        def take(param: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None and param in optimizer._hooks:
                optimizer._book.take_early(param)

        for param, entry in self._book.entries.items():
            if entry.arena.streamed and param.requires_grad and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(take)

    def disarm(self) -> None:
        """Undoes `arm`. Gradients that have travelled are forgotten."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._book.drop_early()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets gradients that have travelled already."""
        self._book.drop_early()
        super().zero_grad(set_to_none)

    # -- the state ------------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """By parameter: `step`, `exp_avg`, `exp_avg_sq` and, for half precision, `master`. Waits for the last step."""
        self.synchronize()
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state = value

    def resident_state(self) -> list[torch.Tensor]:
        """The memory of the state that stays where the parameters are, and does not travel. Waits for nothing."""
        return self._book.resident()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Loads a state of this class or of a plain AdamW, in place; an empty one too. Moments become float32; without a
        master, that comes from the parameter. Nothing moves to the device.

        Raises:
            `ValueError`: it does not fit; nothing has been changed then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.synchronize()
        found = matched(state_dict, self.param_groups, self._book.names(self.param_groups))
        update_groups(self.param_groups, state_dict["param_groups"])
        self._state = defaultdict(dict)
        with torch.no_grad():
            self._book.adopt(found, self._state)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def plain_state_dict(self) -> dict[str, Any]:
        """
        The state as a plain `torch.optim.AdamW` loads it: moments and `step`, references as `state_dict()` gives. The
        masters stay behind: half-precision parameters go on from their rounded values.
        """
        return plain(self.state_dict())

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "state": self.state,
            "param_groups": self.param_groups,
            "_caps": self._caps,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        values = state.pop("state")
        if "_caps" in state:
            self._open(state.pop("_caps"), None)
        super().__setstate__(state)
        self._state = defaultdict(dict, values)
        check_groups(self.param_groups, type(self).__name__, ways=False)
