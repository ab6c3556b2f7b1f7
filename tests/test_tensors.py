"""Reading parts of safetensors files: from folders, and over HTTP from a server that counts what it hands out."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_model
from huggingface_hub import constants
from safetensors.torch import save_file

import rope_probe as rp
from rope_probe import tensors
from rope_probe.sources import Source
from rope_probe.tensors import Tensors


def folder_source(folder):
    return Source(str(folder), str(folder), {"source": "folder"}, local=True)


@pytest.fixture
def stored(tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = {
        "a": torch.randn(50, 8, generator=generator, dtype=torch.float64),
        "b": torch.randn(50, 8, generator=generator),
        "c": torch.randn(50, 8, generator=generator).bfloat16(),
        "d": torch.randn(50, 8, generator=generator).half(),
        "one": torch.randn(3, generator=generator),
    }
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, values


@pytest.mark.parametrize("block", [1 << 25, 64])
def test_tensors_as_stored(stored, monkeypatch, block):
    folder, values = stored
    monkeypatch.setattr(tensors, "BLOCK", block)
    found = Tensors(folder_source(folder))
    for name, expected in values.items():
        assert torch.equal(found.tensor(name), expected.float())
    assert found.read_bytes == sum(value.nbytes for value in values.values())


@pytest.mark.parametrize(("gap", "block"), [(1, 1 << 25), (100, 1 << 25), (1 << 18, 1 << 25), (1 << 18, 48)])
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_rows(stored, monkeypatch, name, gap, block):
    folder, values = stored
    monkeypatch.setattr(tensors, "GAP", gap)
    monkeypatch.setattr(tensors, "BLOCK", block)
    wanted = np.array([0, 1, 2, 7, 11, 12, 30, 49])
    found = Tensors(folder_source(folder))
    assert torch.equal(found.rows(name, wanted), values[name].float()[wanted])
    if gap == 1:  # only neighbours are read together
        assert found.read_bytes == len(wanted) * 8 * values[name].element_size()


def test_shards_as_one(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    ids = np.random.default_rng(0).integers(2, 97, (2, 16))
    one, many = (rp.scan(str(tmp_path / name), tokens=ids, draws=8) for name in ("one", "many"))
    for name in one.data_vars:
        np.testing.assert_array_equal(one[name], many[name])
    assert one.attrs["weight_bytes_read"] == many.attrs["weight_bytes_read"]


def test_damaged_header(stored):
    folder, _ = stored
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[10] = 0
    path.write_bytes(data)
    with pytest.raises(rp.ProbeError, match="damaged header"):
        Tensors(folder_source(folder))


# -- a hub of one repository ---------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Files under /owner/name/resolve/REVISION/, in ranges, as the hub hands them out."""

    folder: Path
    ranges = True
    losses = 0  # connections to be lost in the middle of a shard
    sent: list[tuple[str, int]]

    def _file(self):
        match = re.fullmatch(r"/owner/tiny/resolve/([^/]+)/([^/]+)", self.path.partition("?")[0])
        path = self.folder / match[2] if match else None
        return path if path is not None and path.is_file() else None

    def _answer(self, body: bool):
        path = self._file()
        if path is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, wanted = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        partial = bool(wanted) and self.ranges
        part = data[int(wanted[1]) : int(wanted[2]) + 1] if partial else data
        self.send_response(206 if partial else 200)
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(part)))
        if partial:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{len(data)}")
        self.end_headers()
        if body and self.losses and partial and len(part) > 100:
            type(self).losses -= 1
            self.wfile.write(part[:50])
            self.close_connection = True
        elif body:
            self.sent.append((path.name, len(part)))
            self.wfile.write(part)

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """A hub that serves `folder`; `run` calls the command with it as HF_ENDPOINT."""
    folder = tmp_path / "repository"
    tiny_model().bfloat16().save_pretrained(folder, max_shard_size="40KB")

    class Own(Hub):
        sent: list[tuple[str, int]] = []

    Own.folder = folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(*arguments, command="scan"):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": run.endpoint,
            "HF_HOME": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        line = [sys.executable, "-m", "rope_probe", command, "owner/tiny", *map(str, arguments)]
        return subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    run.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield Own, folder, run
    server.shutdown()
    server.server_close()


def test_hub_in_ranges(hub, tmp_path, tokens):
    server, folder, run = hub
    done = run("--tokens", tokens, "--draws", 8, "--json", "-o", tmp_path / "hub.nc")
    assert done.returncode == 0, done.stderr
    ds = rp.load(tmp_path / "hub.nc")
    here = rp.scan(str(folder), tokens=tokens, draws=8)
    for name in here.data_vars:
        np.testing.assert_array_equal(ds[name], here[name])
    assert json.loads(ds.attrs["provenance"]) == {"source": "hub", "revision": COMMIT}
    # the server's own count: headers of the shards, and what the result says was read of them
    shards = list(folder.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in shards)
    sent = sum(size for name, size in server.sent if name.endswith(".safetensors"))
    assert sent == headers + ds.attrs["weight_bytes_read"]
    assert ds.attrs["weight_bytes_read"] == here.attrs["weight_bytes_read"]
    whole = sum(path.stat().st_size for path in shards)
    assert ds.attrs["weight_bytes_read"] < 0.4 * (whole - headers)
    assert json.loads(done.stdout)["weight_bytes_read"] == ds.attrs["weight_bytes_read"]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.fixture
def here(hub, monkeypatch, tmp_path):
    """The hub as this process's own endpoint."""
    _, _, run = hub
    monkeypatch.setattr(tensors, "PAUSES", (0, 0))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{run.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    return Source("owner/tiny", None, {"source": "hub"})


def test_hub_without_ranges(hub, here):
    """A server that sends whole files is refused before a shard is read."""
    server, _, _ = hub
    server.ranges = False
    with pytest.raises(rp.ProbeError, match="does not hand out parts of files"):
        Tensors(here)


def test_lost_connections(hub, here):
    server, folder, _ = hub
    found = Tensors(here)
    name = "model.layers.1.self_attn.q_proj.weight"
    server.losses = 2
    local = Tensors(folder_source(folder))
    assert torch.equal(found.tensor(name), local.tensor(name)) and server.losses == 0
    server.losses = 3
    with pytest.raises(rp.ProbeError, match="owner/tiny"):
        found.tensor(name)
