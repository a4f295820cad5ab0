"""Each MoE family with a plan that divides its experts, under FSDP2 on PipelinedLLEP: a step as of one process."""

import re

import pytest

from benchmarks.every_family import EVERY, config_of
from benchmarks.expert_plans import LEFT_OUT, LOADING, experts_in_plan

PLANNED = [family for family in EVERY if experts_in_plan(config_of(family)) and family not in LEFT_OUT]
# One of each kind: transposed weights, a hash router and streams, two sets of experts, a plan that is cut, a state
# space, sinks, a shared norm, no gate, biases, a class of its own, one expert a token.
KINDS = (
    "aria",
    "deepseek_v4",
    "ernie4_5_vl_moe",
    "gemma4",
    "jamba",
    "laguna",
    "muse_spark",
    "nemotron_h",
    "openai_privacy_filter",
    "step3p7",
    "zaya",
)
# Sums that cancel: gradients of decays, of what mixes streams, of what a norm without a floor divides. One process in
# float32 is as far from float64 there as two ranks are from one process.
CANCELLING = (
    "deepseek_v4",
    "gemma4",
    "glm5_next",
    "hy_v4",
    "hy_v4_vl",
    "lara_mini",
    "muse_spark",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
)
ALONE = {family: f"{family}, loaded without help" for family in LOADING}
MORE = [family for family in PLANNED if family not in KINDS] + list(ALONE.values())
CASES = {
    **{family: {"family": family, "by_itself": False, "rounding": family in CANCELLING} for family in PLANNED},
    **{name: {"family": family, "by_itself": True} for family, name in ALONE.items()},
}
pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def found(launch, selected):
    return launch("every_family_worker.py", 2, selected(CASES), timeout=900)


@pytest.mark.parametrize("family", PLANNED)
def test_a_step_on_two_ranks_is_exact(found, family):
    for rank in found:
        result = rank[family]
        for name, error in result["errors"].items():
            rounding = result["rounding"].get(re.sub(r"\d+", "*", name.rpartition(".")[0]), 0)
            assert error < max(1e-5, 4 * rounding), (name, error, rounding)
        experts = [line for line in result["entries"] if re.search(r"experts: dispatch", line)]
        assert experts and all("PipelinedLLEP" in line for line in experts if "token tiles" not in line)
        assert max(result["waves"].values()) > 1
    assert len(found[0][family]["errors"]) > 40  # all gradients, and the loss


@pytest.mark.parametrize("family", ["laguna", "zaya"])
def test_experts_were_lent(found, family):
    assert found[0][family]["lent"]


@pytest.mark.parametrize("name", ALONE.values())
def test_what_transformers_cannot_load_by_itself(found, name):
    """Each exception in the table is still one."""
    error = LOADING[CASES[name]["family"]].error
    for rank in found:
        if error is None:
            assert rank[name]["others"] and all("conv1d" in other for other in rank[name]["others"])
        else:
            assert error in rank[name]["error"]
