"""The plugin's contract, against a stand-in for Axolotl's `BasePlugin` with the signatures of its documented hooks.

Axolotl 0.19 pins an older Transformers, so that it cannot be installed beside the one that is developed with.
"""

import importlib
import inspect
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pydantic
import pytest
import torch
import yaml
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_longmoe import OffloadStreamAdamW

ROOM = "hf_longmoe.integrations.axolotl"
# Of the hooks that it has here: what Axolotl 0.19 calls them with.
HOOKS = {
    "get_input_args": (),
    "pre_model_load": ("cfg",),
    "post_model_load": ("cfg", "model"),
    "add_callbacks_pre_trainer": ("cfg", "model"),
    "post_trainer_create": ("cfg", "trainer"),
    "post_train": ("cfg", "model"),
}


class BasePlugin:
    def __init__(self):
        self.made = True


@pytest.fixture
def room(monkeypatch):
    stock = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.19.0" if name == "axolotl" else stock(name))
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    known = set(sys.modules)
    yield importlib.import_module(ROOM)
    for name in [name for name in sys.modules if name.startswith(ROOM) and name not in known]:
        del sys.modules[name]


@pytest.fixture
def loaded(room):
    """`loaded(text)`: the plugin, and the YAML's keys as Axolotl validates and hands them on."""

    def loaded(text):
        values = yaml.safe_load(text)
        (path,) = values["plugins"]
        module, _, name = path.rpartition(".")
        plugin = getattr(importlib.import_module(module), name)()  # as Axolotl does
        module, _, name = plugin.get_input_args().rpartition(".")
        args = getattr(importlib.import_module(module), name)
        return plugin, values | args(**values).model_dump()

    return loaded


EXAMPLE = Path(__file__).parents[3] / "examples" / "axolotl.yaml"
CONFIG = f"""
plugins: [{ROOM}.LongMoEAxolotlPlugin]
longmoe:
  dispatch: {{budget: 16KiB}}
  vocab: {{budget: 16KiB}}
  optimizer: {{bucket: 64KiB}}
longmoe_peaks_every: 1
"""


def test_the_hooks_have_the_documented_signatures(room):
    plugin = room.LongMoEAxolotlPlugin()
    assert plugin.made and isinstance(plugin, BasePlugin)
    for name, arguments in HOOKS.items():
        assert tuple(inspect.signature(getattr(plugin, name)).parameters) == arguments
    own = {name for name, value in vars(type(plugin)).items() if inspect.isfunction(value) and name[0] != "_"}
    assert own == set(HOOKS)


def test_two_steps_through_the_hooks_in_axolotl_s_order(loaded, build, tmp_path):
    def run(plugin=None, cfg=None):
        if plugin is not None:
            plugin.pre_model_load(cfg)
        model = build("mixtral", dtype=torch.float32)
        ids = torch.randint(3, 101, (4, 16), generator=torch.Generator().manual_seed(0)).tolist()
        callbacks = []
        if plugin is not None:
            plugin.post_model_load(cfg, model)
            callbacks = plugin.add_callbacks_pre_trainer(cfg, model)
        given = dict(
            max_steps=2, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True
        )
        args = TrainingArguments(str(tmp_path), gradient_checkpointing=True, learning_rate=1e-2, **given)
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
        if plugin is not None:
            plugin.post_trainer_create(cfg, trainer)
        trainer.train()
        streamed = isinstance(trainer.optimizer.optimizer, OffloadStreamAdamW)
        patched = "longmoe" in vars(model)
        if plugin is not None:
            assert all(entry.schedule is not None for entry in model.longmoe.entries)
            plugin.post_train(cfg, trainer.model)
            plugin.post_train(cfg, model)
            assert "longmoe" not in vars(model) and "longmoe" not in vars(trainer.accelerator)
        history = trainer.state.log_history
        return [log["loss"] for log in history if "loss" in log], history, (streamed, patched)

    want, _, before = run()
    got, history, after = run(*loaded(CONFIG))
    assert len(want) == 2 and got == pytest.approx(want, rel=1e-5) and want[0] != want[1]
    assert (before, after) == ((False, False), (True, True))
    (peaks,) = [log for log in history if "peak/vocab_MiB" in log]
    assert peaks["peak/dispatch_MiB"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("cut_cross_entropy: true", "cut_cross_entropy: True does what longmoe.vocab does; remove it"),
        ("activation_offloading: disk", "activation_offloading: 'disk' .*longmoe.boundaries: null"),
        ("deepspeed: zero3.json", "deepspeed: 'zero3.json' is not supported; use fsdp_version: 2"),
        ("fsdp_config: {offload_params: false}", "set fsdp_version: 2"),
        ("context_parallel_size: 2", "context_parallel_size: 2 is not supported here"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(loaded, more, message):
    plugin, cfg = loaded(CONFIG + more)
    with pytest.raises(ValueError, match=message):
        plugin.pre_model_load(cfg)


def test_parts_that_are_off_and_keys_that_are_wrong(loaded, room, build):
    off = f"plugins: [{ROOM}.LongMoEAxolotlPlugin]\nlongmoe: {{vocab: null, boundaries: null, optimizer: null}}\n"
    plugin, cfg = loaded(off + "cut_cross_entropy: true\nlongmoe_peaks_every: 0\n")
    plugin.pre_model_load(cfg)
    assert plugin.add_callbacks_pre_trainer(cfg, None) == []
    plugin.post_trainer_create(cfg, None)  # installs nothing
    model = build("mixtral", dtype=torch.float32)
    plugin.post_model_load(cfg, model)
    assert {e.component: e.schedule for e in model.longmoe.entries}["vocab"] is None
    with pytest.raises(pydantic.ValidationError, match="Unknown key 'vocabulary'.*Known: dispatch, vocab"):
        room.LongMoEArgs(longmoe={"vocabulary": {}})
    with pytest.raises(pydantic.ValidationError, match="dispatch.budget='many'"):
        room.LongMoEArgs(longmoe={"dispatch": {"budget": "many"}})


def test_the_example_is_valid(loaded):
    plugin, cfg = loaded(EXAMPLE.read_text())
    plugin.pre_model_load(cfg)
    config = importlib.import_module(f"{ROOM}.args").config_of(cfg)
    assert config.dispatch.budget == config.vocab.budget == 256 << 20
    assert config.boundaries.host_budget == 64 << 30 and config.optimizer.bucket == 64 << 20


def test_without_axolotl_the_message_says_why():
    with pytest.raises(
        ImportError, match="needs axolotl>=0.19, which is not installed. Axolotl 0.19 pins transformers"
    ):
        importlib.import_module(ROOM)
