"""The wheel holds what the source tree holds, and nothing is importable under a stranger's name."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_installs_elsewhere_and_imports(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Built from a copy, so that setuptools leaves no build/ in the source tree.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "hf_longmoe", "integrations"):
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", source]
    subprocess.run(wheel, check=True, timeout=120)
    (built,) = (tmp_path / "dist").glob("*.whl")

    names = zipfile.ZipFile(built).namelist()
    assert {n.split("/")[0] for n in names if not n.split("/")[0].endswith(".dist-info")} == {"hf_longmoe"}
    assert "hf_longmoe/py.typed" in names
    shipped = {n for n in names if n.endswith(".py")}
    core = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hf_longmoe").rglob("*.py")}
    rooms = {f"hf_longmoe/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "integrations").rglob("*.py")}
    assert shipped == core | rooms

    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, built], check=True, timeout=120)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import hf_longmoe, hf_longmoe.integrations.transformers as t\n"
        f"assert hf_longmoe.__file__.startswith({str(target)!r}), hf_longmoe.__file__\n"
        f"assert t.__file__.startswith({str(target)!r}), t.__file__\n"
        "assert hf_longmoe.patch_model is t.patch_model\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


def test_importing_the_package_loads_no_host():
    code = (
        "import sys, hf_longmoe, hf_longmoe.config\n"
        "assert not {'torch', 'transformers', 'accelerate', 'peft'} & set(sys.modules), sorted(sys.modules)\n"
        "assert set(hf_longmoe.__all__) <= set(dir(hf_longmoe))\n"
        "for name in hf_longmoe.__all__: getattr(hf_longmoe, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
