"""`LongMoEConfig`: every cap, in bytes, frozen at launch. Knows nothing of models."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from hf_longmoe.names import nearest_hint
from hf_longmoe.sizes import parse_bytes

__all__ = ["BoundariesConfig", "DispatchConfig", "LongMoEConfig", "OptimizerConfig", "VocabConfig"]

_UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()


class _Part:
    """One schedule's caps. A field left out is taken from `LONGMOE_<PART>_<FIELD>`, else from `_defaults`."""

    _name: str
    _defaults: dict[str, Any]

    def _resolve(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is _UNSET:
                variable = f"LONGMOE_{self._name}_{field.name}".upper()
                value = os.environ.get(variable, self._defaults[field.name])
                object.__setattr__(self, field.name, value)

    def _size(self, name: str) -> None:
        object.__setattr__(self, name, parse_bytes(getattr(self, name), f"{self._name}.{name}"))

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            hint = nearest_hint(value, choices)
            raise ValueError(f"{self._name}.{name}={value!r} is unknown; choose one of {', '.join(choices)}.{hint}")

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not low <= number < high:
            raise ValueError(f"{self._name}.{name}={value!r} must be a number of at least {low} and below {high}.")
        object.__setattr__(self, name, number)

    def _whole(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not (low <= number <= high and number == int(number)):
            raise ValueError(f"{self._name}.{name}={value!r} must be a whole number, {low} to {high}.")
        object.__setattr__(self, name, int(number))

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(value).lower() not in known:
            raise ValueError(f"{self._name}.{name}={value!r} must be true or false.")
        object.__setattr__(self, name, known[str(value).lower()])


@dataclass(frozen=True, kw_only=True)
class DispatchConfig(_Part):
    """
    Caps of the expert dispatch (and of shared experts and dense MLP layers, which grow with the tokens too).

    Arguments:
        budget (`int` or `str`, defaults to `"256MiB"`):
            Bytes that one block may hold beside its input, its output, the parameters and all their gradients.
        kernel (`str`, defaults to `"auto"`):
            `"auto"`: the written-out backward for the standard gated MLP, the model's own kernel for every other.
            `"model"`: the model's own kernel (`experts_implementation`) for all.
        overlap (`int`, defaults to 1):
            Under expert parallelism: waves that travel while one is computed, 1 to 3. Each takes its share of the
            budget.
        imbalance (`float`, defaults to 1.3):
            Under expert parallelism: experts are lent to less loaded ranks where the largest load of a rank is at
            least this many times the mean. A number above that of the ranks never lends.
    """

    budget: int | str = _UNSET
    kernel: str = _UNSET
    overlap: int = _UNSET
    imbalance: float = _UNSET

    _name = "dispatch"
    _defaults = {"budget": "256MiB", "kernel": "auto", "overlap": 1, "imbalance": 1.3}

    def __post_init__(self) -> None:
        self._resolve()
        self._size("budget")
        self._choice("kernel", ("auto", "model"))
        self._number("imbalance", 1.0, math.inf)
        self._whole("overlap", 1, 3)


@dataclass(frozen=True, kw_only=True)
class VocabConfig(_Part):
    """
    Caps of the vocabulary projection.

    Arguments:
        budget (`int` or `str`, defaults to `"256MiB"`):
            Bytes of logits, and of everything computed from them, alive at once.
        schedule (`str`, defaults to `"auto"`):
            `"tiles"`: blocks of tokens against the full weight, on every rank. `"ring"`: the weight stays divided over
            the ranks (FSDP2), and tokens or parts of the weight travel. `"auto"`: the ring where it can be used.
        label_smoothing (`float`, defaults to 0.0):
            Share of the target spread over the whole vocabulary. Use it in place of
            `TrainingArguments.label_smoothing_factor`, which needs full logits.
        z_loss (`float`, defaults to 0.0):
            Coefficient of the mean squared log-sum-exp added to the loss.
    """

    budget: int | str = _UNSET
    schedule: str = _UNSET
    label_smoothing: float = _UNSET
    z_loss: float = _UNSET

    _name = "vocab"
    _defaults = {"budget": "256MiB", "schedule": "auto", "label_smoothing": 0.0, "z_loss": 0.0}

    def __post_init__(self) -> None:
        self._resolve()
        self._size("budget")
        self._choice("schedule", ("auto", "tiles", "ring"))
        self._number("label_smoothing", 0.0, 1.0)
        self._number("z_loss", 0.0, float("inf"))


@dataclass(frozen=True, kw_only=True)
class BoundariesConfig(_Part):
    """
    Caps of the checkpoint boundaries: inputs of checkpointed layers, kept from forward to backward.

    Arguments:
        host_budget (`int`, `str` or `None`, defaults to `None`):
            Bytes of host memory that a rank may take for them; those beyond it stay on the device. `None`, or
            `"full"`: as many as there are.
        depth (`int`, defaults to 1):
            Copies under way at once, 1 or 2. At most depth + 2 boundaries are on the device.
    """

    host_budget: int | str | None = _UNSET
    depth: int = _UNSET

    _name = "boundaries"
    _defaults = {"host_budget": None, "depth": 1}

    def __post_init__(self) -> None:
        self._resolve()
        if str(self.host_budget).lower() in ("none", "full"):
            object.__setattr__(self, "host_budget", None)
        else:
            self._size("host_budget")
        self._whole("depth", 1, 2)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Part):
    """
    Caps of the optimizer's state, which lives in host memory, and of its step.

    Arguments:
        bucket (`int` or `str`, defaults to `"64MiB"`):
            Bytes of device memory that a bucket may take, at 16 for each element: float32 master weight, two moments
            and gradient.
        slots (`int`, defaults to 2): buckets on the device at once, 1 to 8.
        update_on (`str`, defaults to `"auto"`):
            `"accelerator"`: master weights and moments travel up, and back. `"cpu"`: gradients travel down, parameters
            up. `"both"`: each takes a share of the buckets, by measured speed. `"auto"`: the fastest of these, by a
            few timed buckets of the first step.
        early_gradients (`bool`, defaults to `False`):
            Gradients travel down during backward and leave the device. Refuses clipping, float16 loss scaling and
            gradient accumulation, which need them there.
    """

    bucket: int | str = _UNSET
    slots: int = _UNSET
    update_on: str = _UNSET
    early_gradients: bool = _UNSET

    _name = "optimizer"
    _defaults = {"bucket": "64MiB", "slots": 2, "update_on": "auto", "early_gradients": False}

    def __post_init__(self) -> None:
        self._resolve()
        self._size("bucket")
        self._whole("slots", 1, 8)
        self._choice("update_on", ("auto", "accelerator", "cpu", "both"))
        self._flag("early_gradients")


_PARTS = {
    "dispatch": DispatchConfig,
    "vocab": VocabConfig,
    "boundaries": BoundariesConfig,
    "optimizer": OptimizerConfig,
}


@dataclass(frozen=True, kw_only=True)
class LongMoEConfig:
    """
    Every cap of the product. `None` for a part switches that schedule off.

    Precedence of each field: argument, then environment variable `LONGMOE_<PART>_<FIELD>`, then default.

    ```py
    >>> from hf_longmoe import DispatchConfig, LongMoEConfig
    >>> config = LongMoEConfig(dispatch=DispatchConfig(budget="64MiB"), vocab=None)
    >>> config.dispatch.budget
    67108864
    >>> LongMoEConfig.from_dict(config.to_dict()) == config
    True

    ```
    """

    dispatch: DispatchConfig | None = dataclasses.field(default_factory=DispatchConfig)
    vocab: VocabConfig | None = dataclasses.field(default_factory=VocabConfig)
    boundaries: BoundariesConfig | None = dataclasses.field(default_factory=BoundariesConfig)
    optimizer: OptimizerConfig | None = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name, part in _PARTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, part):
                raise ValueError(f"{name}={value!r} must be a {part.__name__} or None (which switches it off).")

    @classmethod
    def for_budget(
        cls,
        config: Any,
        seq_len: int | str | None = None,
        *,
        device_memory: int | str,
        **layout: Any,
    ) -> LongMoEConfig:
        """
        Caps with which the predicted peaks of a training step fit the device; none that are not needed.

        Arguments:
            config (`PreTrainedConfig`): the model's.
            seq_len (`int` or `str`, *optional*): tokens of a sequence over all ranks that share it, `"1M"`; the
                longest that the config allows if not given.
            device_memory (`int` or `str`): of one device, `"80GiB"`.
            layout: further fields of `Layout`: `world_size`, `ep_size`, `cp_size`, `micro_batch`, `checkpointing` ...

        Raises:
            `ValueError`: nothing makes it fit (the message says which component, by how much, and what would), or as
                `hf_longmoe.plan`.
        """
        from importlib import import_module

        return import_module("hf_longmoe.integrations.transformers.planning").caps_for(
            config, seq_len, device_memory, layout
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, strings and numbers; sizes as integer bytes. `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LongMoEConfig:
        """
        Raises:
            `ValueError`: an unknown key (the message suggests the nearest name), or a value out of range.
        """
        _check_keys("config", values, tuple(_PARTS))
        parts = {}
        for name, fields in values.items():
            if fields is not None:
                _check_keys(name, fields, tuple(_PARTS[name]._defaults))
            parts[name] = None if fields is None else _PARTS[name](**fields)
        return cls(**parts)

    def to_yaml(self, path: str | os.PathLike) -> None:
        import yaml

        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(self.to_dict(), file, sort_keys=False)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike) -> LongMoEConfig:
        """
        Raises:
            `ValueError`: not YAML, an unknown key, or a value out of range; the message names the file.
        """
        import yaml

        with open(path, encoding="utf-8") as file:
            try:
                return cls.from_dict(yaml.safe_load(file) or {})
            except (yaml.YAMLError, ValueError) as error:
                raise ValueError(f"{os.fspath(path)}: {' '.join(str(error).split())}") from error


def _check_keys(where: str, values: Any, known: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where}={values!r} must be a mapping with keys among {', '.join(known)}.")
    for key in values:
        if key not in known:
            raise ValueError(f"Unknown key {key!r} in {where}.{nearest_hint(key, known)} Known: {', '.join(known)}.")
