"""Caps chosen for a budget: ten random draws, each held against what a step of the whole model takes with them."""

import copy
import random

import pytest
import torch
from transformers import AutoConfig

from hf_longmoe import Layout, LongMoEConfig
from hf_longmoe.integrations.transformers import planning
from hf_longmoe.integrations.transformers.fake_step import fake_moments, run_step
from hf_longmoe.integrations.transformers.planning import DoesNotFit, Planner
from hf_longmoe.planner.closed_forms import resident

SMALL = dict(vocab_size=2048, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
MODELS = {
    "mixtral": dict(num_hidden_layers=4, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(num_hidden_layers=3, intermediate_size=64, num_experts=8, num_experts_per_tok=4),
}
LENGTHS, RANKS = (2048, 4096, 8192, 16384), (1, 2, 8)
ALL = LongMoEConfig()


def config_of(model):
    return AutoConfig.for_model(model, **SMALL, **MODELS[model])


def patched(caps):
    return None if caps.dispatch is None and caps.vocab is None else caps


def taken(moments, shape, layout, caps):
    """
    The highest total of a rank, from a step with the real depth. What one rank's step does not show is put in by
    hand: weights and their state divided and gathered, boundaries and optimizer state on the host.
    """
    own, ranks = resident(shape, layout), layout.world_size
    gathered = 2 * own.gathered_layer + own.gathered_head
    boundary = layout.tokens * shape.hidden * layout.itemsize
    highest = 0
    for (phase, _), moment in moments.items():
        for levels in moment.levels.values():
            here = dict(levels)
            for name in ("parameters", "gradients", "optimizer"):
                here[name] = levels[name] // ranks
            if caps.optimizer is not None:
                here["optimizer"] = 0
            if caps.boundaries is not None:
                # 1% for routing that is pinned with each boundary
                here["boundaries"] = min(levels["boundaries"], (caps.boundaries.depth + 2) * boundary * 1.01)
            if ranks > 1 and phase != "resident":
                here["parameters"] += gathered
                here["gradients"] += gathered if phase == "backward" else 0
            highest = max(highest, sum(here.values()))
    if caps.optimizer is not None:
        highest = max(highest, own.parameters + own.gradients + caps.optimizer.slots * caps.optimizer.bucket)
    return highest


@pytest.fixture(scope="module", params=MODELS)
def planner(request, short_counts):
    """What is counted once for a model serves all its draws."""
    return Planner(config_of(request.param), Layout(seq_len=2048))


@pytest.fixture
def counted(planner, monkeypatch):
    """`for_budget` for the config of `planner`, by what that has counted, which serves any layout."""

    def of(config, layout):
        found = copy.copy(planner)
        found.layout = layout
        return found

    monkeypatch.setattr(planning, "Planner", of)


@pytest.mark.slow
@pytest.mark.parametrize("draws", [1, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_a_step_stays_within_the_budget_that_the_caps_were_chosen_for(planner, draws):
    config, draw = planner.config, random.Random(planner.config.model_type)
    chosen = []
    for _ in range(draws):
        ranks = draw.choice(RANKS)
        layout = Layout(seq_len=draw.choice(LENGTHS), world_size=ranks)
        most, least = planner.unbounded(layout).total, planner.choose(0, layout)[1]
        limit = int(least + draw.random() * (most - least))
        caps, total = planner.choose(limit, layout)
        assert total <= limit < most
        # What is measured beside the gathered head of a tied or of a stock step: at most what was predicted.
        (moments,) = fake_moments(config, layout, [layout.seq_len], patched=patched(caps))
        assert taken(moments, planner.shape, layout, caps) <= limit, (layout, caps)
        chosen.append(caps)
    assert draws == 1 or len(set(map(str, chosen))) > 1, "every draw gave the same caps"


@pytest.mark.slow
def test_a_real_step_stays_within_the_budget_too(planner):
    """One rank, real data, and routers that choose as they like."""
    config, layout = planner.config, planner.layout
    draw = random.Random(config.model_type)
    most, least = planner.unbounded().total, planner.choose(0)[1]
    for _ in range(2):
        limit = int(least + draw.random() * (most - least))
        caps, total = planner.choose(limit)
        torch.manual_seed(0)
        _, moments = run_step(config, layout, patched(caps), attention="sdpa")
        assert 0 < taken(moments, planner.shape, layout, caps) <= limit, caps


@pytest.mark.parametrize("planner", ["mixtral"], indirect=True)
def test_a_model_that_fits_gets_no_caps(counted):
    caps = LongMoEConfig.for_budget(config_of("mixtral"), 2048, device_memory="80GiB")
    assert caps == LongMoEConfig(dispatch=None, vocab=None, boundaries=None, optimizer=None)


@pytest.mark.parametrize("planner", ["mixtral"], indirect=True)
def test_what_cannot_fit_says_what_would(counted):
    config = config_of("mixtral")
    with pytest.raises(
        DoesNotFit, match=r"does not fit.* by .* beyond .*; fits with .*--seq-len (\d+k?)\."
    ) as refused:
        LongMoEConfig.for_budget(config, "64k", device_memory="96MiB")
    length = str(refused.value).rpartition("--seq-len ")[2].rstrip(".")
    assert LongMoEConfig.for_budget(config, length, device_memory="96MiB").dispatch is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(world=8), "for_budget has no argument 'world'.*world_size"),
        (dict(seq_len="1 parsec"), "seq_len='1 parsec' is not a number of tokens"),
        (dict(device_memory="80GG"), "device_memory='80GG' is not a size"),
        (dict(world_size=2, cp_size=4), "cp_size=4 does not divide world_size=2"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        LongMoEConfig.for_budget(config_of("mixtral"), **{"seq_len": 1024, "device_memory": "1GiB", **given})
