"""``URL::SECTION`` means what ``PATH::SECTION`` means: the same answers from a web server, S3,
memory and a cache.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from command import Done, Run
from places import DOCS
from remote_servers import web_server

NEEDS_S3 = pytest.mark.skipif(
    not (find_spec("s3fs") and find_spec("moto")), reason="s3fs or moto is not installed"
)
NEEDS_HTTP = pytest.mark.skipif(not find_spec("aiohttp"), reason="aiohttp is not installed")
CODE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

def adam(model):
    return torch.optim.Adam(model.parameters())
"""


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    wrapped = {f"module.{key}": value + 1 for key, value in model.state_dict().items()}
    return {
        "model": model.state_dict(),
        "ema": wrapped,
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)
    out = io.BytesIO()
    torch.save(trained(), out)
    Path("x.pt").write_bytes(out.getvalue())
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    torch.export.save(torch.export.export(model, (torch.ones(1, 3),)), "p.pt2")
    return out.getvalue()


@pytest.fixture(
    params=[
        "memory",
        pytest.param("http", marks=NEEDS_HTTP),
        pytest.param("s3", marks=NEEDS_S3),
        "cache",
    ]
)
def url(request: pytest.FixtureRequest, data: bytes) -> Iterator[str]:
    if request.param == "http":
        with web_server({"/x.pt": data}) as server:
            yield f"{server.url}/x.pt"
        return
    if request.param == "s3":
        fs, name = request.getfixturevalue("bucket")
        fs.pipe_file(f"{name}/x.pt", data)
        yield f"s3://{name}/x.pt"
        return
    fs = fsspec.filesystem("memory")
    fs.pipe("/sections/x.pt", data)
    yield (
        "simplecache::memory://sections/x.pt"
        if request.param == "cache"
        else "memory://sections/x.pt"
    )
    fs.rm("/sections", recursive=True)


COMMANDS = """
inspect {x}::model
inspect {x}::ema --stats
inspect {x}::model --filter '0.*'
inspect {x}::optimizer
inspect {x}::nothing
diff {x}::model
diff {x}::model {x}::ema
diff {x}::model {x}::ema --values
diff {x}::model --model net.py:build
diff {x}::ema --model net.py:build
diff {x}::optimizer --model net.py:build --optimizer net.py:adam
diff {x}::model --model net.py:build --optimizer net.py:adam
diff p.pt2 {x}::model
remap {x}::model -o OUT --rule '0.{{x}} => first.{{x}}'
remap {x}::model -o OUT --like {x}::ema
remap {x}::ema -o OUT --model net.py:build --to serialized --verify
remap {x}::model -o OUT/ --rule '0.{{x}} => first.{{x}}'
convert {x}::ema -o OUT
convert {x}::ema -o OUT.dcp
fix {x}::ema --model net.py:build -o OUT
swap-weights p.pt2 {x}::model -o OUT.pt2
swap-weights p.pt2 {x}::ema -o OUT.pt2 --model net.py:build
""".strip().splitlines()


def answer(done: Done, path: str) -> tuple[int, str, str]:
    """Return the status and the output, without what depends on the place of the file and its
    name.
    """

    def neutral(text: str) -> str:
        text = text.replace(path, "PLACE")
        folder, slash, _ = path.rpartition("/")
        text = text.replace(folder + slash, "") if slash else text
        return re.sub(r"[ ]{2,}|─+|bytes fetched.*", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))

    return done.status, neutral(done.out), neutral(done.err)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_section_behind_a_url_gives_the_answer_of_the_file(line: str, url: str, run: Run) -> None:
    answers = []
    for number, place in enumerate(("x.pt", url)):
        words = shlex.split(line.format(x=place).replace("OUT", f"out{number}"))
        if "-o" in words and words[words.index("-o") + 1] == f"out{number}":
            words[words.index("-o") + 1] += ".safetensors"
        status, out, err = answer(run(*words), place)
        answers.append(
            (status, out.replace(f"out{number}", "OUT"), err.replace(f"out{number}", "OUT"))
        )
    local, remote = answers
    assert remote == local
    written = [sorted(Path().glob(f"out{number}*")) for number in range(2)]
    for left, right in zip(*written):
        assert left.is_dir() or left.read_bytes() == right.read_bytes()
    assert len(written[0]) == len(written[1]) == (" -o " in line)


@NEEDS_S3
def test_each_line_of_the_page_works(data: bytes, bucket: Any, tmp_path: Path, run: Run) -> None:
    """Against S3, also the lines with gs://: its driver needs another server."""
    fs, name = bucket
    state = trained()["model"]

    def put(key: str, value: object) -> None:
        out = io.BytesIO()
        torch.save(value, out)
        fs.pipe_file(f"{name}/{key}", out.getvalue())

    put("run/train.ckpt", {"state_dict": state, "epoch": 3})
    put("train.pt", {"model": state})
    for step in (1000, 2000):
        run("convert", "x.pt::model", "-o", f"step-{step}.dcp")
        fs.put(f"step-{step}.dcp", f"{name}/", recursive=True)
    save_file({f"model.{key}": value for key, value in state.items()}, "all.safetensors")
    run("convert", "all.safetensors", "-o", "hub-model/", "--max-shard-size", "60B")
    fs.put("hub-model", f"{name}/", recursive=True)
    save_file(state, "new.safetensors")
    fs.put("new.safetensors", f"{name}/new.safetensors")
    shutil.copy("p.pt2", "program.pt2")
    page = (DOCS / "remote.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ckpttool (.*)$", page, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        done = run(*shlex.split(re.sub(r"\b(s3|gs)://bucket/", f"s3://{name}/", line)))
        assert done.status == 0, f"{line}\n{done.said}"
    chained = re.findall(r"`(simplecache::s3://bucket/[^`]*)`", page)
    assert chained
    for operand in chained:
        done = run("inspect", operand.replace("bucket", name))
        assert done.status == 0, f"{operand}\n{done.said}"
    shutil.make_archive("all", "zip", ".", "new.safetensors")
    (inside,) = re.findall(r"`(zip://[^`]*\.zip)`", page)
    put_in = inside.replace("model.pt", "new.safetensors").replace(
        "/data/all.zip", str(tmp_path / "all.zip")
    )
    assert run("inspect", put_in).status == 0
