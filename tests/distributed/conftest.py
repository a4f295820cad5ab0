"""One way to start several ranks: a file of cases in, a file of results of every rank out, and an end to it."""

import json
import multiprocessing
import runpy
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# What the scripts import, and what takes most of a launch's time: once for all launches.
IMPORTS = [
    "accelerate",
    "datasets",
    "transformers.trainer",
    "transformers.models.mixtral.modeling_mixtral",
    "hf_longmoe.integrations.accelerate",
    "hf_longmoe.integrations.transformers",
]


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
    `selected(cases)`: without those in the module's `MORE`, but for what a test that is to run has among its parameters.
    """
    more = set(getattr(request.module, "MORE", ()))
    wanted = {name for item in request.session.items if item.module is request.module for name in names_of(item)}
    return lambda cases: {name: case for name, case in cases.items() if name not in more or name in wanted}


@pytest.fixture(scope="session")
def forks():
    """Starts processes that are forks of one which has imported what takes long, and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def launch(tmp_path_factory, forks):
    """
    `launch(script, ranks, cases, timeout=100)` -> what each rank wrote, a list over ranks.

    `script` lies in this folder and calls `ranks.main`, which says how ranks start and end. A launch that lasts
    longer than `timeout` seconds fails the test.
    """

    def launch(script, ranks, cases, timeout=100):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        (folder / "cases.json").write_text(json.dumps(cases))
        process = forks.Process(target=runpy.run_path, args=(str(HERE / script),), kwargs={"run_name": "__main__"})
        with pytest.MonkeyPatch.context() as patch:  # a new process gets both as they are here
            patch.setattr(sys, "argv", [script, str(folder), str(ranks), str(timeout)])
            patch.syspath_prepend(str(HERE))
            process.start()
        process.join(timeout + 60)  # the script ends its ranks itself; this counts its imports too
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode:
            failed = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("rank*.failed")))
            said = (folder / "said.txt").read_text() if (folder / "said.txt").exists() else ""
            pytest.fail(f"{script} on {ranks} ranks ended with {process.exitcode}:\n{failed or said[-6000:]}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return launch
