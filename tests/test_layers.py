"""Arrows point down only: integrations -> planner, peaks -> schedules -> torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOSTS = {"transformers", "accelerate", "peft", "trl", "datasets", "lightning", "axolotl"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module


# The package's own __init__ names what the rooms offer, and loads it on first use.
CORE = [p for p in sorted((ROOT / "hf_longmoe").rglob("*.py")) if p != ROOT / "hf_longmoe" / "__init__.py"]


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_only_what_lies_below(path):
    names = set(imports(path))
    part = path.relative_to(ROOT / "hf_longmoe").parts[0]
    assert not {n.split(".")[0] for n in names} & HOSTS
    assert not any(n.startswith("hf_longmoe.integrations") for n in names)
    above = {"schedules": ("peaks", "planner"), "peaks": ("planner",)}.get(part, ())
    assert not [n for n in names for a in above if n.startswith(f"hf_longmoe.{a}")]


def test_a_schedule_does_not_import_another():
    for path in (ROOT / "hf_longmoe" / "schedules").glob("*/*.py"):
        others = {d.name for d in path.parents[1].iterdir() if d.is_dir()} - {path.parent.name, "host"}
        assert not [n for n in imports(path) for o in others if n.startswith(f"hf_longmoe.schedules.{o}")], path


def test_files_stay_small():
    long = {
        str(p.relative_to(ROOT)): n
        for folder in ("hf_longmoe", "integrations", "examples", "benchmarks")
        for p in (ROOT / folder).rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 330
    }
    assert not long
