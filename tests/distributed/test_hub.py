"""`push_to_hub` of a model sharded over two ranks, against a small stand-in for the Hub's HTTP interface."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_longmoe.peaks import load_reports
from hf_longmoe.sizes import format_bytes

HERE = Path(__file__).parent


class Hub(BaseHTTPRequestHandler):
    """Takes new repositories and commits whose files come with them. It does not know the Hub's rules for cards."""

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        hub, url = self.server, self.path.partition("?")[0]
        hub.requests.append((url, self.headers.get("Authorization")))
        if url == "/api/repos/create":
            hub.created = json.loads(sent)
            answer = {"url": f"{hub.url}/someone/longmoe-mixtral"}
        elif url == "/api/validate-yaml":
            answer = {}
        elif url == "/api/models/someone/longmoe-mixtral/preupload/main":
            paths = [file["path"] for file in json.loads(sent)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        elif url == "/api/models/someone/longmoe-mixtral/commit/main":
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    path = hub.folder / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            answer = {"commitUrl": f"{hub.url}/someone/longmoe-mixtral/commit/abc", "commitOid": "abc"}
        else:
            self.send_error(404)
            return
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.folder, server.requests = f"http://127.0.0.1:{server.server_port}", tmp_path / "hub", []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_sharded_model_is_pushed_as_a_plain_repository_with_its_schedules_and_peaks(hub, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    environment.pop("HF_HUB_OFFLINE", None)
    run = subprocess.run(
        [sys.executable, str(HERE / "hub_worker.py"), str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
    said = json.loads((tmp_path / "results.json").read_text())
    assert said["commit"] == "abc" and hub.created["name"] == "longmoe-mixtral"
    assert all(token == "Bearer hf_fake" for _, token in hub.requests)
    assert [url for url, _ in hub.requests].count("/api/repos/create") == 1, "more ranks than one have pushed"

    names = {path.relative_to(hub.folder).as_posix() for path in hub.folder.rglob("*") if path.is_file()}
    wanted = {"README.md", "config.json", "generation_config.json", "model.safetensors", "peaks.json", "peaks.png"}
    assert wanted <= names and not any("checkpoint" in name or "shard" in name for name in names), names
    pushed, saved = (AutoModelForCausalLM.from_pretrained(folder) for folder in (hub.folder, tmp_path / "saved"))
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    same = [torch.equal(value, saved.state_dict()[name]) for name, value in pushed.state_dict().items()]
    assert all(same) and len(same) == 21
    assert not any(torch.equal(value, first[name]) for name, value in pushed.state_dict().items()), "not trained"

    peaks = load_reports(hub.folder / "peaks.json")["this run"]
    assert peaks.ranks == 2 and peaks.components["dispatch"].peak > 0
    for folder in (hub.folder, tmp_path / "saved"):
        card = ModelCard.load(folder / "README.md")
        assert card.data.library_name == "transformers" and {"hf-longmoe", "generated_from_trainer"} <= {
            *card.data.tags
        }
        assert ("long-context" in card.data.tags) is (folder == hub.folder)
        assert card.data.license is None and card.text.count("## Memory") == 1
        assert f"{said['report'][0]}, and 1 more module" in card.text  # two layers
        assert "PipelinedLLEP" in said["report"][0] and said["report"][-1] in card.text
        assert "optimizer:" in card.text and "2 steps and 2 ranks (storage probe)" in card.text
        for name in ("dispatch", "vocab", "optimizer"):
            part = peaks.components[name]
            sizes = " | ".join(map(format_bytes, (part.peak, part.at_peak, part.working)))
            assert f"| {name} | {sizes} |" in card.text
        assert f"| **total** | {format_bytes(peaks.total)} |" in card.text
        assert ("peaks.png" in card.text) is (folder == hub.folder)
    assert "### Training hyperparameters" in card.text
