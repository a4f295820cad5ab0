"""A plan for people, the lines that use it, its curves, and a prediction beside a measurement."""

import ast
import inspect
import io
import json
from types import SimpleNamespace

import pytest
from accelerate.utils import ParallelismConfig
from transformers import TrainingArguments
from transformers.distributed import DistributedConfig

from hf_longmoe import BoundariesConfig, DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig
from hf_longmoe.peaks import ComponentPeak, PeakReport
from hf_longmoe.peaks.region import COMPONENTS
from hf_longmoe.planner import LayerParameters, Layout, ModelShape, Plan, Prediction
from hf_longmoe.planner.caps import NOTHING
from hf_longmoe.planner.plot import curves, plot_plan
from hf_longmoe.planner.recipe import launch_line, python_lines
from hf_longmoe.planner.table import print_comparison, print_plan, print_verification
from hf_longmoe.planner.verification import Row, Verification, compare, off

MIB, GIB = 2**20, 2**30
KNOWN = {kind.__name__: kind for kind in (DistributedConfig, ParallelismConfig, TrainingArguments)}
SHAPE = ModelShape(
    model_type="tiny",
    hidden=4,
    vocab=10,
    layers=(LayerParameters(attention=500_000_000),) * 2,
    embedding=0,
    head=0,
    final_norm=0,
    other=0,
    wide=(0, 0),
    largest_parameter=64,
    heads=2,
    kv_heads=1,
    head_dim=2,
    value_dim=2,
)
CAPS = LongMoEConfig(
    dispatch=DispatchConfig(budget="64MiB"),
    vocab=VocabConfig(budget="32MiB"),
    optimizer=OptimizerConfig(bucket="16MiB"),
)


def prediction(phase="backward", host=None, **sizes):
    parts = dict.fromkeys(COMPONENTS, 0) | sizes
    total, work = sum(sizes.values()), max(sizes, key=sizes.get)
    return Prediction(components=parts, total=total, at_peak=parts, phase=phase, at_work=work, host=host or {})


class Straight:
    """1 MiB of `vocab` a thousand tokens and 2 GiB beside; scheduled, a quarter of that."""

    def both(self, length, config):
        return tuple(prediction(vocab=length * part, layer=2 * GIB) for part in (1024, 256))


def plan_of(config=CAPS, *, limit=None, longest=(None, None), at_most=3 * GIB, **layout):
    return Plan(
        shape=SHAPE,
        layout=Layout(seq_len=131_072, **layout),
        config=config,
        limit=limit,
        unbounded=prediction(dispatch=3 * GIB, vocab=5 * GIB),
        scheduled=prediction("forward", {"boundaries": GIB, "optimizer": 2 * GIB}, dispatch=2 * GIB, vocab=MIB),
        at_most=at_most,
        longest_unbounded=longest[0],
        longest_scheduled=longest[1],
        planner=Straight(),
    )


def printed(plan, **options):
    file = io.StringIO()
    print_plan(plan, file=file, **options)
    assert file.getvalue().isascii() and "\x1b" not in file.getvalue()
    return file.getvalue()


def cells(text):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


# -- the table and its sentences -------------------------------------------------------------------------------------
def test_every_component_that_holds_something_has_a_row():
    found = cells(printed(plan_of()))
    assert found["component"] == ["unbounded", "at its peak", "scheduled", "at its peak", "on the host"]
    assert found["dispatch"] == ["3 GiB", "3 GiB", "2 GiB", "2 GiB", ""]
    assert found["vocab"] == ["5 GiB", "5 GiB", "1 MiB", "1 MiB", ""]
    assert found["total"] == ["", "8 GiB", "", "2 GiB", "3 GiB"]
    assert set(found) == {"component", "dispatch", "vocab", "total"}


def test_what_the_plan_is_of():
    title = printed(plan_of(world_size=64, ep_size=8, cp_size=4)).splitlines()[0]
    assert title.startswith("tiny, ") and "128k tokens on 64 ranks (ep 8, cp 4, fsdp 64)" in title
    assert "128k tokens on 1 rank:" in printed(plan_of()).splitlines()[0]


def test_sentences_without_a_device():
    text = printed(plan_of())
    assert "in backward (vocab) unbounded, and in forward (dispatch) scheduled." in text
    assert "Whatever the routing, the scheduled total stays within 3 GiB." in text
    assert " fit" not in text


@pytest.mark.parametrize(
    ("limit", "longest", "at_most", "config", "expected"),
    [
        (
            4 * GIB,
            (65_536, 1_048_576),
            3 * GIB,
            CAPS,
            [
                "Unbounded does not fit in 4 GiB. What dies first is layer, at ",
                "The longest context that fits: 64k tokens unbounded, 1M tokens scheduled.",
            ],
        ),
        (
            4 * GIB,
            (None, 1024),
            5 * GIB,
            CAPS,
            ["The longest context that fits: none unbounded, 1k tokens scheduled.", "The caps given do not fit;"],
        ),
        (
            # the total of balanced routing fits, that of any other does not
            2 * GIB + 2 * MIB,
            (None, None),
            3 * GIB,
            CAPS,
            ["The longest context that fits: none unbounded, none scheduled.", "The caps given do not fit;"],
        ),
        (8 * GIB, (131_072, 131_072), 8 * GIB, NOTHING, ["Unbounded fits in 8 GiB.", "No schedule is needed"]),
        (6 * GIB, (None, None), 8 * GIB, NOTHING, ["Unbounded does not fit in 6 GiB.", "The caps given do not fit;"]),
    ],
)
def test_sentences_about_a_device(limit, longest, at_most, config, expected):
    text = printed(plan_of(config, limit=limit, longest=longest, at_most=at_most))
    for sentence in expected:
        assert sentence in text
    for sentence in ("No schedule is needed", "The caps given do not fit;"):
        assert (sentence in text) == (sentence in expected)


def test_what_dies_first_is_asked_of_the_first_length_that_does_not_fit():
    plan = plan_of(limit=4 * GIB, longest=(2 * MIB, 8 * MIB))
    component, length = plan.dies_first()
    assert component == "vocab" and 2 * MIB < length <= 2 * MIB + 1024
    assert plan.at(length)[0].total > plan.limit >= plan.at(2 * MIB)[0].total
    assert plan_of().dies_first() is None and plan_of().fits is None
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["dies_first"] == {"component": "vocab", "seq_len": length}
    assert values["unbounded"]["total"] == 8 * GIB and values["scheduled"]["host"]["boundaries"] == GIB


# -- the lines that use it -------------------------------------------------------------------------------------------
GIVEN = LongMoEConfig(
    dispatch=None,
    vocab=VocabConfig(budget="1MiB", schedule="ring", z_loss=1e-4),
    boundaries=BoundariesConfig(host_budget="8GiB", depth=2),
    optimizer=OptimizerConfig(bucket="1MiB", slots=3, update_on="cpu", early_gradients=True),
)


@pytest.mark.parametrize("config", [CAPS, GIVEN, NOTHING, LongMoEConfig(boundaries=None, optimizer=None)])
def test_the_python_lines_give_the_same_caps(config):
    namespace = {}
    lines = python_lines(plan_of(config))
    exec("\n".join(line for line in lines if line.startswith(("from ", "config"))), namespace)
    assert namespace["config"] == config
    assert ("patch_model(model, config)" in lines) == (config != NOTHING)
    offloads = config.boundaries is not None or config.optimizer is not None
    assert any(line.startswith("LongMoEPlugin(config).install(") for line in lines) == offloads


def calls(lines):
    """`{name: keyword arguments}` of the calls, each of which the class has."""
    found = {}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KNOWN:
            inspect.signature(KNOWN[node.func.id]).bind_partial(**{word.arg: None for word in node.keywords})
            values = {word.arg: word.value for word in node.keywords if not isinstance(word.value, ast.Call)}
            found[node.func.id] = {name: ast.literal_eval(value) for name, value in values.items()}
    return found


def test_several_ranks_are_given_what_divides_the_model_and_what_the_step_is_of():
    layout = dict(world_size=8, ep_size=4, cp_size=2, micro_batch=3, parameter_dtype="float32")
    lines = python_lines(plan_of(CAPS, **layout, checkpointing="reentrant"), "80GiB")
    head = {"fsdp_plan": {"lm_head": "free_full_weight"}} if CAPS.vocab is not None else {}
    assert calls(lines) == {
        "DistributedConfig": {"fsdp_size": 8, "ep_size": 4, "ep_implementation": "pipelined_llep", **head},
        "TrainingArguments": {
            "per_device_train_batch_size": 3,
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
            "bf16": True,
        },
        "ParallelismConfig": {"cp_size": 2, "dp_shard_size": 4},
    }
    assert lines[-1].startswith("LongMoEPlugin(config).install(trainer.accelerator)")
    assert any("LongMoETrainer(model=model, args=args" in line for line in lines)
    tiles = LongMoEConfig(dispatch=None, vocab=VocabConfig(budget="1MiB", schedule="tiles"), boundaries=None)
    found = calls(python_lines(plan_of(tiles, world_size=8, checkpointing="off")))
    assert found == {"DistributedConfig": {"fsdp_size": 8}, "TrainingArguments": {"per_device_train_batch_size": 1}}


def test_the_launch_line_of_several_machines():
    assert launch_line(plan_of(NOTHING)) == "accelerate launch --num_processes 1 train.py"
    assert launch_line(plan_of(NOTHING, world_size=8)) == "accelerate launch --multi_gpu --num_processes 8 train.py"
    assert "--num_processes 24 --num_machines 3 --machine_rank" in launch_line(plan_of(NOTHING, world_size=24))


def test_for_budget_is_given_the_device_and_the_layout(monkeypatch):
    given = {}

    def for_budget(config, **options):
        given.update(options, config=config)
        return CAPS

    monkeypatch.setattr(LongMoEConfig, "for_budget", for_budget)
    layout = dict(
        world_size=8, ep_size=4, cp_size=2, fsdp_size=4, micro_batch=2, imbalance=1.3, parameter_dtype="float32"
    )
    lines = python_lines(plan_of(**layout, checkpointing="reentrant"), "80GiB")
    exec(
        "\n".join(line for line in lines if line.startswith(("from ", "config"))),
        {"model": SimpleNamespace(config="the config")},
    )
    seq_len, memory, config = (given.pop(name) for name in ("seq_len", "device_memory", "config"))
    assert (seq_len, memory, config) == (131_072, "80GiB", "the config")
    assert given == layout | {"checkpointing": "reentrant"}  # and nothing that is so by default
    assert python_lines(plan_of(), "80GiB")[2].endswith('seq_len=131072, device_memory="80GiB")')


def test_the_lines_are_printed():
    text = printed(plan_of(), device_memory="80GiB")
    assert '\n  config = LongMoEConfig.for_budget(model.config, seq_len=131072, device_memory="80GiB")\n' in text
    assert f"\n  {launch_line(plan_of())}\n" in text
    assert "\n  config = LongMoEConfig(dispatch=DispatchConfig(budget=67108864), " in printed(plan_of())


# -- curves ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("longest", [None, 1_000_000])
def test_curves_are_what_the_plan_says_at_each_length(longest):
    plan = plan_of(limit=4 * GIB, longest=(None, longest))
    lengths, before, after = curves(plan)
    assert lengths[0] == 4096 and lengths[-1] >= max(131_072, longest or 0)
    assert all(b == 2 * a for a, b in zip(lengths, lengths[1:], strict=False))
    for length, one, other in zip(lengths, before, after, strict=True):
        assert (one["vocab"], other["vocab"]) == (1024 * length, 256 * length)
        assert (one["total"], other["total"]) == tuple(found.total for found in plan.at(length))
        assert one["dispatch"] == one["boundaries"] == one["optimizer"] == 0


@pytest.mark.parametrize("limit", [None, 4 * GIB])
def test_the_plot_is_a_picture(tmp_path, limit):
    plot_plan(tmp_path / "plan.png", plan_of(limit=limit, longest=(65_536, None)))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


# -- verification ----------------------------------------------------------------------------------------------------
def measured(**sizes):
    parts = {
        name: ComponentPeak(peak=n, at_peak=n, working=0, phases={"forward": n})
        for name in COMPONENTS
        for n in [sizes.get(name, 0)]
    }
    total = sum(sizes.values())
    return PeakReport(total=total, components=parts, phases={"forward": total}, probe="storage")


def test_what_holds_next_to_nothing_is_not_compared():
    rows = compare(prediction(vocab=990, aux=1, layer=10), measured(vocab=1000, layer=100, aux=1, other=899))
    assert [(row.component, row.predicted, row.measured) for row in rows] == [
        ("vocab", 990, 1000),
        ("layer", 10, 100),
        ("other", 0, 899),
        ("total", 1001, 2000),
    ]
    assert [row.difference for row in rows] == [0.01, 0.9, 1.0, 999 / 2000]
    assert off(rows, 0.1) == ["layer above", "other above"] and off(rows, 0.95) == ["other above"]
    assert off([Row("vocab", 9, 5)], 0.1) == ["vocab below"]


def test_a_verification_in_words_and_as_json():
    rows = {"unbounded": [Row("vocab", 990, 1000), Row("total", 990, 1000)], "scheduled": [Row("aux", 7, 0)]}
    found = Verification((1, 2), rows)
    assert found.worst == Row("aux", 7, 0)
    file = io.StringIO()
    print_verification(found, file=file)
    text = file.getvalue()
    assert text.isascii() and "fake steps of 1 and 2 layers" in text and "unbounded" in text and "scheduled" in text
    assert cells(text)["vocab"] == ["990 B", "1000 B", "1.00%"] and cells(text)["aux"][:2] == ["7 B", "0 B"]
    values = found.to_dict()
    assert values["depths"] == [1, 2] and values["rows"]["unbounded"][0]["difference"] == 0.01
    # Strict JSON has no infinity.
    assert values["rows"]["scheduled"][0] == {
        "component": "aux",
        "predicted_bytes": 7,
        "measured_bytes": 0,
        "difference": None,
    }
    assert Row("aux", 0, 0).difference == 0.0


def test_a_run_beside_its_prediction():
    def told(**sizes):
        file = io.StringIO()
        print_comparison(prediction(vocab=1000, layer=500), measured(**sizes), file=file)
        return file.getvalue()

    text = told(vocab=1300, layer=510)
    assert cells(text)["vocab"] == ["1000 B", "1.27 KiB", "23.08%"]
    assert text.rstrip().endswith("Off its prediction by more than 10%: vocab above.")
    assert told(vocab=1050, layer=510).rstrip().endswith("Every component is within 10% of its prediction.")
