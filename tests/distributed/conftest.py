"""One way to start several ranks: a file of cases in, a file of results of every rank out, and an end to it."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_itemcollected(item):
    """A test that has a name out of its module's `MORE` among its parameters is for `make test-all`."""
    if names_of(item) & set(getattr(item.module, "MORE", ())):
        item.add_marker(pytest.mark.exhaustive)


def names_of(item):
    """All strings among a test's parameters, and in the lists and tuples there."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    lists = (value if isinstance(value, (list, tuple)) else [value] for value in values)
    return {name for names in lists for name in names if isinstance(name, str)}


@pytest.fixture(scope="module")
def selected(request):
    """
    `selected(cases)`: without those in the module's `MORE`, but for what a test that will run has as a parameter.
    """
    more = set(getattr(request.module, "MORE", ()))
    wanted = {name for item in request.session.items if item.module is request.module for name in names_of(item)}
    return lambda cases: {name: case for name, case in cases.items() if name not in more or name in wanted}


@pytest.fixture(scope="session")
def launch(tmp_path_factory, python):
    """
    `launch(script, ranks, cases, timeout=180)` -> what each rank wrote, a list over ranks.

    `script` lies in this folder and calls `ranks.main`, which says how ranks start and end. A launch that lasts
    longer than `timeout` seconds fails the test.
    """

    def launch(script, ranks, cases, timeout=180):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        (folder / "cases.json").write_text(json.dumps(cases))
        # The script ends its ranks itself; this counts its imports too.
        run = python(HERE / script, folder, ranks, timeout, timeout=timeout + 60)
        if run.returncode:
            failed = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("rank*.failed")))
            said = failed or (run.stdout + run.stderr)[-6000:]
            pytest.fail(f"{script} on {ranks} ranks ended with {run.returncode}:\n{said}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return launch
