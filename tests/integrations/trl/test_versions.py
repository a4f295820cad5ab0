"""A TRL that is missing or too old is one clear error."""

from importlib import metadata

import pytest

from hf_longmoe.integrations.trl.versions import check_trl


@pytest.mark.parametrize(("version", "state"), [(None, "is not installed"), ("1.15.2", "is 1.15.2")])
def test_it_is_named_with_what_is_needed(monkeypatch, version, state):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    check_trl()
    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ImportError, match=rf"needs trl>=1\.16, which {state}: pip install hf-longmoe\[trl\]"):
        check_trl()
