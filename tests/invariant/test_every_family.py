"""Every MoE family of the installed Transformers: what is patched stays so, and is exact in float64."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.every_family import EVERY, check, model_of, reported, row
from benchmarks.families import FAMILIES
from benchmarks.own_blocks import OWN_BLOCKS
from hf_longmoe import patch_model, unpatch_model

ROOT = Path(__file__).parents[2]
TABLE = {line.split(" ")[1]: line for line in (ROOT / "docs/families.md").read_text().splitlines() if line[:2] == "| "}
NOTHING_PATCHED = ("nllb_moe", "switch_transformers")
SLOW = ("diffusion_gemma", "dots3_note")


def test_the_table_has_every_family():
    models = Path(transformers.__file__).parent / "models"
    by_interface, others = set(), set()
    for file in models.glob("*/modeling_*.py"):
        text = file.read_text()
        if "use_experts_implementation" in text:
            by_interface.add(file.parent.name)
        elif re.search(r"^class \w*(Experts|SparseMLP|MoE|ExpertGLU)\(nn\.Module", text, re.MULTILINE):
            others.add(file.parent.name)
    assert by_interface == set(FAMILIES)
    assert others == set(OWN_BLOCKS)
    assert by_interface | others == TABLE.keys() - {"family"}


def parameters():
    for family in EVERY:
        if family not in NOTHING_PATCHED:
            yield pytest.param(family, marks=[pytest.mark.exhaustive] if family in SLOW else [])


@pytest.mark.parametrize("family", list(parameters()))
def test_exact(family):
    checked = check(family)
    assert checked.loss <= 1e-12
    assert checked.gradient <= 1e-12, checked.worst
    assert not checked.without
    assert row(family, checked.entries, model_of(family, torch.float32).config) == TABLE[family]


@pytest.mark.parametrize("family", NOTHING_PATCHED)
def test_nothing_to_patch(family):
    assert row(family, *reported(family)) == TABLE[family]
    with pytest.raises(ValueError, match="nothing to patch.*beyond a capacity.*cross-entropy of its own"):
        patch_model(model_of(family))


def test_how_many_are_patched():
    lines = {family: [cell.strip() for cell in TABLE[family].split("|")[1:-1]] for family in EVERY}
    waves = [family for family in FAMILIES if re.search("written out|model's kernel", lines[family][1])]
    assert len(waves) >= 64
    for family in ("step3p7", "dbrx", "llama4"):
        assert re.search("written out|model's kernel", lines[family][1])
    heads = {family for family in EVERY if lines[family][3] != "tiles"}
    assert heads == {"diffusion_gemma", "openai_privacy_filter", *NOTHING_PATCHED}


@pytest.mark.parametrize("family", sorted(OWN_BLOCKS.keys() - set(NOTHING_PATCHED)))
def test_unpatching_a_block_of_its_own(family):
    model = model_of(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    unpatch_model(patch_model(model))
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
