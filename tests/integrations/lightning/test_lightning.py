"""Lightning's Trainer and Fabric: the losses of stock runs, peaks in the loggers, boundaries and state on the host."""

import copy
import csv
import pickle

import pytest
import torch
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy

from hf_longmoe import (
    BoundariesConfig,
    DispatchConfig,
    LongMoEConfig,
    OffloadStreamAdamW,
    OptimizerConfig,
    VocabConfig,
)
from hf_longmoe.integrations.lightning import LightningAdamW, LongMoECallback, LongMoESchedules
from hf_longmoe.peaks import load_reports
from hf_longmoe.schedules.host import FakeEngine

STEPS = 4


def caps(**parts):
    given = dict(dispatch=DispatchConfig(budget="16KiB"), vocab=VocabConfig(budget="16KiB"))
    given |= dict(boundaries=BoundariesConfig(), optimizer=OptimizerConfig(bucket="64KiB", update_on="accelerator"))
    return LongMoEConfig(**given | parts)


def small(build):
    model = build("mixtral", dtype=torch.float32, num_hidden_layers=4)
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def batches():
    ids = torch.randint(3, 101, (2 * STEPS, 16), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)


class Module(LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer, self.losses = model, optimizer, []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-2)


def fit(module, folder, callbacks=(), **options):
    given = dict(max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    given |= dict(logger=CSVLogger(folder), default_root_dir=folder, enable_checkpointing=False, log_every_n_steps=50)
    trainer = Trainer(callbacks=[*callbacks], **given | options)
    trainer.fit(module, batches())
    return trainer


def test_the_trainer(build, tmp_path, capsys):
    stock = Module(small(build), torch.optim.AdamW)
    fit(stock, tmp_path / "stock")
    engine = FakeEngine()
    callback = LongMoECallback(caps(), every=1, first=3, engine=engine)
    offloads = []

    class Module2(Module):
        def on_train_end(self):
            assert "longmoe" in vars(self.model)
            offloads.append(callback.schedules.installed.offload.offloaded)

    ours = Module2(small(build), callback.schedules.adamw)
    trainer = fit(ours, tmp_path / "ours", [callback], log_every_n_steps=50)
    assert len(ours.losses) == STEPS and ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert len(set(ours.losses)) == STEPS
    assert isinstance(trainer.optimizers[0], LightningAdamW)
    assert offloads == [3] and engine.sent["down"] > 0 and engine.sent["up"] > 0
    assert "longmoe" not in vars(ours.model) and callback.schedules.installed is None  # after teardown

    report = callback.report
    assert report.steps == 2 and load_reports(tmp_path / "ours" / "peaks.json") == {"this run": report}
    assert report.components["vocab"].working <= 16 << 10 and report.components["dispatch"].working <= 16 << 10
    (file,) = (tmp_path / "ours").rglob("metrics.csv")
    with open(file) as lines:
        rows = [row for row in csv.DictReader(lines) if row["peak/total_MiB"]]
    assert [int(row["step"]) for row in rows] == [3, 4]
    assert max(float(row["peak/total_MiB"]) for row in rows) == round(report.total / 2**20, 3)
    assert float(rows[0]["peak/vocab_MiB"]) > 0 and "Peak bytes, this run" in capsys.readouterr().out


def test_accumulation_is_one_step(build, tmp_path):
    callback = LongMoECallback(caps(boundaries=None), every=1, first=1)
    fit(Module(small(build), torch.optim.AdamW), tmp_path, [callback], accumulate_grad_batches=2)
    assert callback.report.steps == STEPS // 2


def test_an_error_in_a_step_leaves_nothing_behind(build, tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("midway")
            return super().training_step(batch, batch_idx)

    module = Failing(small(build), torch.optim.AdamW)
    before = module.model.forward
    callback = LongMoECallback(caps(), every=1, first=1)
    with pytest.raises(RuntimeError, match="midway"):
        fit(module, tmp_path, [callback])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert "longmoe" not in vars(module.model) and module.model.forward == before


def test_what_is_refused(build, tmp_path):
    with pytest.raises(ValueError, match="every=0 must be a whole number of steps"):
        LongMoECallback(every=0)
    callback = LongMoECallback(caps())
    with pytest.raises(ValueError, match="LongMoECallback does not run under FSDPStrategy; use ddp"):
        callback.setup(type("Under", (), {"strategy": FSDPStrategy.__new__(FSDPStrategy)}), None, "fit")
    for hook in ("setup", "configure_model"):
        late = type("Late", (Module,), {hook: lambda self, stage=None: self.__setattr__("model", small(build))})
        with pytest.raises(ValueError, match="Late holds no Transformers model yet; make it in __init__"):
            fit(late(None, torch.optim.AdamW), tmp_path, [callback])
    model = small(build)
    with LongMoESchedules(caps()).install(model) as schedules:
        pass
    schedules.install(model)
    with pytest.raises(ValueError, match="on a model already; remove"):
        schedules.install(model)
    with pytest.raises(ValueError, match="boundaries are offloaded already"):
        LongMoESchedules(caps()).install(model)
    schedules.remove()
    with pytest.raises(ValueError, match="vocab.budget=1024 .*too small"):
        LongMoESchedules(caps(vocab=VocabConfig(budget=1024))).install(model)
    assert "longmoe" not in vars(model)
    LongMoESchedules(caps()).install(model)  # nothing was left by the one that failed


def test_fabric(build):
    def run(schedules=None):
        fabric = Fabric(accelerator="cpu", devices=1)
        model = small(build)
        plain = model
        if schedules is not None:
            schedules.install(model, fabric.device)
        make = torch.optim.AdamW if schedules is None else schedules.adamw
        model, optimizer = fabric.setup(model, make(model.parameters(), lr=1e-2))
        losses = []
        for batch in fabric.setup_dataloaders(batches()):
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, plain, optimizer

    want, _, _ = run()
    engine = FakeEngine()
    with LongMoESchedules(caps(), engine=engine) as schedules:
        got, model, optimizer = run(schedules)
        assert schedules.installed.offload.offloaded == 3 and engine.sent["down"] > 0
        assert all(entry.schedule is not None for entry in model.longmoe.entries)
    assert got == pytest.approx(want, rel=1e-5) and len(set(want)) == STEPS
    assert "longmoe" not in vars(model) and isinstance(optimizer, LightningAdamW)


def test_the_state_stays_on_the_host_when_lightning_moves_it():
    for cls, device in ((OffloadStreamAdamW, "meta"), (LightningAdamW, "cpu")):
        parameter = torch.nn.Parameter(torch.ones(8))
        optimizer = cls([parameter])
        parameter.grad = torch.ones(8)
        optimizer.step()
        saved = optimizer.state_dict()
        assert type(saved["state"][0]) is dict and saved["state"][0]["exp_avg"].any()
        optimizer.load_state_dict(saved)
        _optimizers_to_device([optimizer], torch.device("meta"))
        assert optimizer.state[parameter]["exp_avg"].device.type == device


def test_the_state_goes_with_a_copy_and_comes_from_a_plain_adamw():
    parameter = torch.nn.Parameter(torch.ones(8))
    plain = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(8)
    plain.step()
    want = plain.state[parameter]["exp_avg"].clone()
    optimizer = LightningAdamW.from_adamw(plain)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (values,) = one.state.values()
        assert torch.equal(values["exp_avg"], want) and values["step"] == 1
        (parameter,) = one.param_groups[0]["params"]
        parameter.grad = torch.ones(8)
        one.step()
        assert one.state[parameter]["step"] == 2
