"""A host that is too old is one clear error, before anything of it is imported."""

import subprocess
import sys
from importlib import metadata

import pytest

from hf_longmoe.integrations.transformers.versions import check_versions


@pytest.fixture
def installed(monkeypatch):
    """`installed(torch="2.10.0")`: what `importlib.metadata` says from here on; None: not installed."""
    stock = metadata.version

    def fake(**versions):
        def version(name):
            if versions.get(name, "") is None:
                raise metadata.PackageNotFoundError(name)
            return versions.get(name) or stock(name)

        monkeypatch.setattr(metadata, "version", version)

    return fake


@pytest.mark.parametrize(
    ("name", "version", "needs"),
    [
        ("torch", "2.10.0+cu128", "torch>=2.11 (2.10.0+cu128 is installed)"),
        ("transformers", "4.57.1", "transformers<6,>=5.24 (4.57.1 is installed)"),
        ("transformers", "6.0.0", "transformers<6,>=5.24 (6.0.0 is installed)"),
        ("accelerate", "1.14.2", "accelerate>=1.15 (1.14.2 is installed)"),
        ("accelerate", None, "accelerate>=1.15 (not installed)"),
    ],
)
def test_a_wrong_version_is_named_with_what_is_needed(installed, name, version, needs):
    installed(**{name: version})
    with pytest.raises(ImportError) as caught:
        check_versions()
    assert str(caught.value) == f'hf_longmoe needs {needs}. To get it: pip install "{needs.partition(" ")[0]}"'


def test_several_are_named_in_one_message(installed):
    installed(torch="2.9", accelerate="1.0")
    with pytest.raises(ImportError, match=r"torch>=2\.11 \(2\.9 .*; accelerate>=1\.15 \(1\.0 .*pip install"):
        check_versions()


def test_pre_releases_and_local_builds_of_what_is_needed_pass(installed):
    installed(torch="2.11.0a0+git123", transformers="5.24.0.dev0", accelerate="1.16.0rc1")
    check_versions()


def test_without_metadata_nothing_is_checked(installed, monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    installed(torch="1.0")
    monkeypatch.setattr(metadata, "requires", requires)
    check_versions()


def test_it_comes_before_any_import_of_a_host():
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "stock = metadata.version\n"
        "metadata.version = lambda name: '4.0' if name == 'transformers' else stock(name)\n"
        "for host in ('torch', 'transformers', 'accelerate'): sys.modules[host] = None\n"  # importing one would raise
        "try:\n"
        "    from hf_longmoe import patch_model\n"
        "except ImportError as error:\n"
        "    assert str(error).startswith('hf_longmoe needs transformers'), error\n"
        "else:\n"
        "    raise AssertionError('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
