"""What a person names a model by -> its config. Only the config is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_longmoe.names import nearest_hint

__all__ = ["config_of"]

_READ_IF_GIVEN = ("head_dim",)  # models read it, and their configs have it only if it was given


def config_of(model: str, *, changes: dict[str, Any] | None = None, remote_code: bool = False) -> PreTrainedConfig:
    """
    Arguments:
        model: a folder with a `config.json`, such a file, a model type (which has the sizes of its config's defaults),
            or a Hub id, of which the config alone is downloaded.
        changes: fields of the config (of its text part, in a multimodal one) and their values.
        remote_code: whether code that comes with the model may run.

    Raises:
        `ValueError`: there is no such model, or no such field; the message names what is near.
    """
    where = Path(model)
    if where.is_dir() or where.suffix == ".json":
        if not (where / "config.json" if where.is_dir() else where).is_file():
            raise ValueError(f"{model}: there is no config.json.")
        found = _read(str(where), remote_code)
    elif model in CONFIG_MAPPING_NAMES:
        found = AutoConfig.for_model(model)
    elif "/" not in model:
        hint = nearest_hint(model, CONFIG_MAPPING_NAMES)
        raise ValueError(f"{model!r} is no model type, folder or config.json; a Hub id is owner/name.{hint}")
    else:
        found = _read(model, remote_code)
    text = found.get_text_config()
    for name, value in (changes or {}).items():
        if name not in _READ_IF_GIVEN and (not hasattr(text, name) or callable(getattr(text, name))):
            hint = nearest_hint(name, text.to_dict())
            raise ValueError(f"the config of {model!r} has no field {name!r}.{hint}")
        try:
            setattr(text, name, value)
        except StrictDataclassError as error:
            raise ValueError(f"the config of {model!r} takes no {name}={value!r} ({_reason(error)}).") from error
    layers = getattr(text, "num_hidden_layers", None)
    types = getattr(text, "layer_types", None)
    if "num_hidden_layers" in (changes or {}) and isinstance(types, list) and types and len(types) != layers:
        text.layer_types = [types[i % len(types)] for i in range(layers)]
    return found


def _read(model: str, remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{model}: its config cannot be read ({_reason(error)}).") from error


def _reason(error: Exception) -> str:
    """One line: of a field's check the last, which names the types; else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[-1] if isinstance(error, StrictDataclassError) else lines[0]
    return line.strip().removesuffix(".")
