"""One way to start several ranks: a file of cases in, a file of results of every rank out, and an end to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """
    `launch(script, ranks, cases, timeout=100)` -> what each rank wrote, a list over ranks.

    `script` lies in this folder and calls `ranks.main`, which says how ranks start and end. A launch that lasts
    longer than `timeout` seconds fails the test.
    """

    def launch(script, ranks, cases, timeout=100):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        (folder / "cases.json").write_text(json.dumps(cases))
        run = subprocess.run(
            [sys.executable, str(HERE / script), str(folder), str(ranks), str(timeout)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout + 60,  # the script ends its ranks itself; this counts its imports too
        )
        if run.returncode:
            failed = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("rank*.failed")))
            pytest.fail(f"{script} on {ranks} ranks ended with {run.returncode}:\n{failed or run.stdout[-6000:]}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return launch
