"""One way to start several ranks: torchrun, a file of cases in, a file of results of every rank out, and an end."""

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

    `script` lies in this folder and calls `ranks.main`. A launch that lasts longer than `timeout` seconds fails the
    test: first each worker prints where it stands and ends itself, then torchrun is ended with whatever it has left.
    """

    def launch(script, ranks, cases, timeout=100):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        (folder / "cases.json").write_text(json.dumps(cases))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
        run = subprocess.Popen(
            [*torchrun, str(HERE / script), str(folder), str(timeout)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = run.communicate(timeout=timeout + 10)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun hands it on to its workers
            try:
                output, _ = run.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                run.kill()
                output, _ = run.communicate()
        if run.returncode:
            failed = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("rank*.failed")))
            pytest.fail(f"{script} on {ranks} ranks ended with {run.returncode}:\n{failed or output[-6000:]}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return launch
