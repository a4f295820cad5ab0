"""Script of `test_hub`: two ranks train a sharded model, push it to the endpoint of the environment, and save it."""

import json
import sys
from pathlib import Path

import forked
import resumed_run

from hf_longmoe import ComponentPeakCallback


def main(folder):
    resumed_run.make_model(f"{folder}/model")

    def work(rank):
        made, _ = resumed_run.trainer(
            f"{folder}/model",
            f"{folder}/run",
            f"{folder}/losses",
            ranks=2,
            streaming=True,
            callbacks=[ComponentPeakCallback(every=1, first=1)],
            max_steps=2,
            save_steps=2,
            hub_model_id="someone/longmoe-mixtral",
            hub_token="hf_fake",
        )
        made.train()
        pushed = made.push_to_hub(tags=["long-context"])
        made.save_model(f"{folder}/saved")
        if rank == 0:
            said = {"commit": pushed.oid, "report": [str(entry) for entry in made.model.longmoe.entries]}
            Path(folder, "results.json").write_text(json.dumps(said))

    for rank in forked.launch(work, 2, f"{folder}/logs"):
        assert rank["code"] == 0, rank["said"]


if __name__ == "__main__":
    main(sys.argv[1])
