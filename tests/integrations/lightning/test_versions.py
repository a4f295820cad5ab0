"""A Lightning that is missing or too old is one clear error."""

from importlib import metadata

import pytest

from hf_longmoe.integrations.lightning.versions import check_lightning


@pytest.mark.parametrize(("version", "state"), [(None, "is not installed"), ("2.5.9", "is 2.5.9")])
def test_it_is_named_with_what_is_needed(monkeypatch, version, state):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    check_lightning()
    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(
        ImportError, match=rf"needs lightning>=2\.6, which {state}: pip install hf-longmoe\[lightning\]"
    ):
        check_lightning()
