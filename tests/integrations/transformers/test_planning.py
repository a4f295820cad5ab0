"""`config_of`, and `Planner` on tiny configs: against fake steps, by hand, and at the edges of a limit."""

import copy
import dataclasses
import json
import re

import pytest
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from hf_longmoe import BoundariesConfig, DispatchConfig, LongMoEConfig, OptimizerConfig, VocabConfig
from hf_longmoe.integrations.transformers import planned_config, planning
from hf_longmoe.integrations.transformers.fake_step import two_depths
from hf_longmoe.integrations.transformers.planned_config import config_of
from hf_longmoe.integrations.transformers.planning import DoesNotFit, Planner, plan
from hf_longmoe.planner import Layout
from hf_longmoe.planner.caps import NOTHING
from hf_longmoe.planner.closed_forms import exchange_bytes, resident
from hf_longmoe.planner.plan import STEP
from hf_longmoe.sizes import parse_tokens

VOCAB, DEPTH, LENGTH = 4096, 4, 3000  # a length that is not counted
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=DEPTH,
    num_experts_per_tok=2,
    num_local_experts=2,
)
CAPS = LongMoEConfig(
    dispatch=DispatchConfig(budget="1MiB"), vocab=VocabConfig(budget="16MiB"), boundaries=None, optimizer=None
)


pytestmark = pytest.mark.usefixtures("short_counts")


@pytest.fixture(scope="module")
def planner(short_counts):
    return Planner(AutoConfig.for_model("mixtral", **SMALL), Layout(seq_len=LENGTH))


def layout(**options):
    return Layout(**{"seq_len": LENGTH, **options})


# -- one rank alone --------------------------------------------------------------------------------------------------
def test_the_vocabulary_of_a_stock_step_is_three_times_its_float32_logits(planner):
    found = planner.unbounded(alone=True)
    assert found.components["vocab"] == pytest.approx(12 * LENGTH * VOCAB, rel=0.01)
    assert found.components["boundaries"] == DEPTH * LENGTH * 64 * 2


def test_predictions_are_what_fake_steps_show(planner):
    found = planner.verify(dataclasses.replace(CAPS, optimizer=OptimizerConfig()))
    assert set(found.rows) == {"unbounded", "scheduled"} and found.depths == (1, 2)
    assert found.worst.difference < 0.01
    assert {row.component for row in found.rows["scheduled"]} >= {"dispatch", "vocab", "layer", "total"}
    unbounded, scheduled = ({row.component: row.measured for row in rows} for rows in found.rows.values())
    assert scheduled["vocab"] < unbounded["vocab"] / 8 and scheduled["dispatch"] < unbounded["dispatch"]


def test_several_sequences(planner):
    given = layout(seq_len=2048, micro_batch=4)
    found, (_, report) = planner.unbounded(given, alone=True), two_depths(planner.config, given)
    assert found.total == pytest.approx(report.total, rel=0.01)
    for name in ("dispatch", "vocab", "boundaries", "gradients"):
        assert found.components[name] == pytest.approx(report.components[name].peak, rel=0.005), name


def test_a_model_that_was_sharded_at_load_and_a_launch_that_shares_sequences_change_nothing(planner, monkeypatch):
    config = copy.deepcopy(planner.config)
    config.distributed_config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="pipelined_llep")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    found = Planner(config, planner.layout)
    for way in ("at_most", "scheduled"):
        assert getattr(found, way)(CAPS) == getattr(planner, way)(CAPS)
    assert config.distributed_config is not None


def test_only_a_cap_that_is_too_small_is_no_answer(planner, monkeypatch):
    small = dataclasses.replace(CAPS, vocab=VocabConfig(budget="1KiB"))
    assert planner.at_most(small) is None and planner.at_most(CAPS) > 0
    with monkeypatch.context() as patch:
        patch.setattr(planning, "predict", lambda *args: int("nothing"))
        with pytest.raises(ValueError, match="invalid literal"):
            planner.at_most(CAPS)


# -- a rank in company -----------------------------------------------------------------------------------------------
def test_what_is_divided_by_fsdp_and_gathered_again(planner):
    eight = layout(world_size=8)
    own, alone, found = resident(planner.shape, eight), planner.unbounded(alone=True), planner.unbounded(eight)
    assert own.elements == -(-planner.shape.parameters // 8) or own.elements == planner.shape.parameters // 8 + 1
    assert found.components["optimizer"] == pytest.approx(alone.components["optimizer"] / 8, rel=0.01)
    head = planner.shape.vocab * 64 * 2
    assert own.gathered_head == head > 2 * own.gathered_layer
    assert found.components["parameters"] == pytest.approx(own.parameters + head, rel=0.01)  # and buffers
    assert found.components["gradients"] <= own.gradients + 2 * head
    for name in ("dispatch", "vocab", "boundaries", "layer"):
        assert found.components[name] == alone.components[name], name


def test_the_ring_gathers_no_head(planner):
    eight = layout(world_size=8)
    own = resident(planner.shape, eight)
    ring = planner.scheduled(CAPS, eight)
    tiles = planner.scheduled(dataclasses.replace(CAPS, vocab=VocabConfig(budget="16MiB", schedule="tiles")), eight)
    assert ring.components["parameters"] == pytest.approx(own.parameters + 2 * own.gathered_layer, rel=0.01)
    assert tiles.components["parameters"] == pytest.approx(own.parameters + own.gathered_head, rel=0.01)


def test_parameters_kept_in_float32(planner):
    half, full = (planner.unbounded(layout(world_size=8, parameter_dtype=d)) for d in ("bfloat16", "float32"))
    assert full.components["optimizer"] == pytest.approx(2 * half.components["optimizer"], rel=0.001)
    own = resident(planner.shape, layout(world_size=8))
    more = full.components["parameters"] - half.components["parameters"]
    assert more == pytest.approx(own.parameters, rel=0.01)  # what is gathered is bfloat16 in both


def test_a_shared_sequence_is_a_share_of_its_tokens(planner):
    shared = planner.unbounded(layout(seq_len=8 * LENGTH, world_size=8, cp_size=8))
    assert shared == planner.unbounded(layout(world_size=8))


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", 12), ("float32", 8)])
def test_what_goes_to_the_host(planner, dtype, each):
    given = layout(world_size=8, parameter_dtype=dtype)
    # A layer's input, and of its router's choice 4 bytes for each of two experts.
    one, own = LENGTH * (64 * 2 + 2 * 4), resident(planner.shape, given)
    found = planner.scheduled(LongMoEConfig(), given)
    assert found.host == {"boundaries": DEPTH * one, "optimizer": each * own.elements}
    assert found.components["boundaries"] == 3 * one
    assert found.components["optimizer"] <= 2 * OptimizerConfig().bucket
    few = dataclasses.replace(LongMoEConfig(), boundaries=BoundariesConfig(host_budget=3 * one - 1))
    assert planner.scheduled(few, given).host["boundaries"] == 2 * one


def test_rows_of_other_ranks_under_expert_parallelism(short_counts):
    even = layout(seq_len=4096, world_size=2, ep_size=2)
    planner = Planner(AutoConfig.for_model("mixtral", **{**SMALL, "num_hidden_layers": 1}), even)
    assert planner.unbounded(alone=True).components["boundaries"] == 4096 * 64 * 2
    rows = 4096 * 2

    def dispatch(given):
        return planner.unbounded(given).components["dispatch"]

    beside = dispatch(even) - planner.unbounded(alone=True).components["dispatch"]
    assert beside == exchange_bytes(rows, rows, 64, 2) == 4 * rows * 128
    uneven = dispatch(dataclasses.replace(even, imbalance=1.5))
    # Half as many rows more, each with what the experts make of it: at least its input, inner and outer gradients.
    assert uneven - dispatch(even) > 2 * (rows // 2) * 128 + (rows // 2) * 3 * 128
    assert planner.at_most(LongMoEConfig(), even) is not None


# -- caps and limits -------------------------------------------------------------------------------------------------
def test_whatever_the_routing_is_at_least_the_balanced(planner):
    for length in (1024, LENGTH):
        given = layout(seq_len=length)
        balanced, most = planner.scheduled(CAPS, given), planner.at_most(CAPS, given)
        assert balanced.total <= most
    assert most < planner.unbounded(given).total
    assert planner.at_most(NOTHING, given) == planner.unbounded(given).total


def test_a_cap_below_one_row_keeps_nothing(planner):
    tiny = dataclasses.replace(CAPS, dispatch=DispatchConfig(budget=64))
    assert planner.at_most(tiny) is None and planner.longest(2**40, tiny) is None
    with pytest.raises(ValueError, match="is below one wave of 4 rows"):
        planner.scheduled(tiny)


@pytest.mark.parametrize("caps", [NOTHING, CAPS, LongMoEConfig()], ids=["nothing", "caps", "all"])
@pytest.mark.parametrize("limit", [50_000_000, 300_000_000])
def test_the_longest_is_at_the_edge(planner, caps, limit):
    found = planner.longest(limit, caps)
    before, after = (planner.at_most(caps, layout(seq_len=n)) for n in (found, found + STEP))
    assert found % STEP == 0 and before <= limit < after


def test_the_caps_chosen_fit_and_are_needed(planner, monkeypatch):
    monkeypatch.setattr(planning, "Planner", lambda config, layout: planner)
    whole = planner.unbounded().total
    roomy = plan(planner.config, planner.layout, whole + 1, headroom=0)
    assert roomy.config == NOTHING and roomy.fits and roomy.config_is_empty
    assert roomy.longest_unbounded <= LENGTH < roomy.longest_unbounded + 2 * STEP
    tight = plan(planner.config, planner.layout, whole // 2, headroom=0)
    assert tight.config.dispatch is not None and tight.at_most <= tight.limit and tight.fits
    assert tight.longest_unbounded < LENGTH <= tight.longest_scheduled + STEP
    component, length = tight.dies_first()
    assert component == "vocab" and length == tight.longest_unbounded + STEP
    assert plan(planner.config, planner.layout).config == LongMoEConfig()
    assert plan(planner.config, planner.layout, "1GiB").limit == int(2**30 * 0.92)


def test_what_does_not_fit_says_by_how_much_and_what_would(planner, monkeypatch):
    monkeypatch.setattr(planning, "Planner", lambda config, layout: planner)
    limit = planning.choose(planner.at_most, 0)[1] * 9 // 10
    with pytest.raises(DoesNotFit) as refused:
        plan(planner.config, planner.layout, limit, headroom=0)
    text = str(refused.value)
    assert "\n" not in text and re.search(r"does not fit.* by \S+ \wiB beyond the \S+ MiB that", text)
    length = parse_tokens(re.search(r"--seq-len (\w+)", text)[1])
    ranks, shared = re.search(r"--world-size (\d+)(?: --cp (\d+))?", text).groups(default="1")
    assert length < LENGTH and int(ranks) > 1
    for given in (layout(seq_len=length), layout(world_size=int(ranks), cp_size=int(shared))):
        assert planning.choose(lambda caps, given=given: planner.at_most(caps, given), limit)[1] <= limit


def test_a_dense_model_is_planned_without_dispatch(short_counts):
    sizes = {name: value for name, value in SMALL.items() if "experts" not in name}
    config = AutoConfig.for_model("llama", **{**sizes, "num_hidden_layers": 1})
    found = plan(config, Layout(seq_len=1024))
    assert found.config.dispatch is None and found.config.vocab is not None
    assert found.unbounded.components["dispatch"] == 0 < found.unbounded.components["vocab"]
    with pytest.raises(ValueError, match="ep_size=2, but llama as configured has no experts; give ep_size=1"):
        plan(config, Layout(seq_len=64, world_size=2, ep_size=2))


def test_without_checkpointing_there_are_no_boundaries():
    config = AutoConfig.for_model("mixtral", **{**SMALL, "num_hidden_layers": 1})
    found = Planner(config, Layout(seq_len=1024, checkpointing="off"))
    assert found.without_absent(LongMoEConfig()) == dataclasses.replace(LongMoEConfig(), boundaries=None)
    offloading = dataclasses.replace(NOTHING, boundaries=BoundariesConfig(), optimizer=OptimizerConfig())
    scheduled = found.scheduled(offloading)
    assert scheduled.components["boundaries"] == 0 and set(scheduled.host) == {"optimizer"}


# -- configs ---------------------------------------------------------------------------------------------------------
def test_a_config_by_type_folder_or_file(tmp_path):
    config = config_of("mixtral", changes=dict(SMALL))
    assert (config.model_type, config.hidden_size, config.num_local_experts) == ("mixtral", 64, 2)
    config.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        read = config_of(str(place), changes={"num_hidden_layers": 7})
        assert (read.hidden_size, read.num_hidden_layers) == (64, 7)
    assert config_of("mixtral").hidden_size == AutoConfig.for_model("mixtral").hidden_size


def test_kinds_of_layers_go_on_in_their_pattern():
    config = config_of("gpt_oss", changes={"num_hidden_layers": 50})
    assert len(config.layer_types) == 50 and config.layer_types[48:] == config.layer_types[:2]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("mixtrl", {}, "'mixtrl' is no model type, folder or config.json; a Hub id is owner/name. Did you mean 'mixt"),
        ("mixtral", {"hiden_size": 3}, "the config of 'mixtral' has no field 'hiden_size'. Did you mean 'hidden_size"),
        ("mixtral", {"to_dict": 3}, "has no field 'to_dict'"),
        ("mixtral", {"hidden_size": "wide"}, "takes no hidden_size='wide' (TypeError: Field 'hidden_size' expected"),
        ("FOLDER", {}, "FOLDER: there is no config.json."),
        ("FOLDER/none.json", {}, "none.json: there is no config.json."),
    ],
)
def test_names_and_fields_that_are_not_there(tmp_path, model, changes, message):
    with pytest.raises(ValueError) as refused:
        config_of(model.replace("FOLDER", str(tmp_path)), changes=changes)
    assert message.replace("FOLDER", str(tmp_path)) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", "{}", json.dumps({"model_type": "mixtral", "hidden_size": "wide"}), '{"model_type": "mixtrall"}'],
)
def test_files_that_are_no_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^\S+: its config cannot be read \(.+\)\.$"):
        config_of(str(tmp_path))


def test_the_hub_is_asked_for_the_config_alone(monkeypatch):
    def refuse(name, **options):
        asked.append((name, options))
        raise OSError("no such repository\nand advice")

    asked = []
    monkeypatch.setattr(planned_config.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=r"^some/model: its config cannot be read \(no such repository\)\.$"):
        config_of("some/model", remote_code=True)
    assert asked == [("some/model", {"trust_remote_code": True})]


def test_ranks_that_share_a_sequence_are_verified_too(planner):
    shared = copy.copy(planner)  # what it has counted serves any layout
    shared.layout = layout(seq_len=2 * LENGTH, world_size=2, cp_size=2)
    found = shared.verify(CAPS)
    assert found.worst.difference < 0.01


def test_sizes_that_do_not_fit_together_are_one_line(capfd):
    config = AutoConfig.for_model("mixtral", **{**SMALL, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match=r"its sizes do not fit together \(.*\)\.$"):
        plan(config, Layout(seq_len=1024))
    assert not capfd.readouterr().err
