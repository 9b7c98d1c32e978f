"""Limits on input: it is read quickly and in little memory, or refused with the name of the
limit.
"""

from __future__ import annotations

import os
import pty
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest
import torch

from ckpttool import CkptError, open_checkpoint
from ckpttool.core.limits import Limits, limited, limits, with_memory
from ckpttool.io.files import opened
from ckpttool.ruleset.parse import read_rules
from command import main

MAX_SECONDS = 2.0
NEEDS_HTTP = pytest.mark.skipif(not find_spec("aiohttp"), reason="aiohttp is not installed")


def test_max_memory_raises_the_limits_on_memory() -> None:
    assert with_memory(None) == with_memory("1G") == with_memory("1GiB") == Limits()
    four = with_memory("4G")
    assert (four.json_bytes, four.pickle_memory, four.pickle_opcodes) == (4 << 30, 1 << 29, 1 << 27)
    assert (four.rules_seconds, four.pickle_marks) == (
        Limits().rules_seconds,
        Limits().pickle_marks,
    )
    with limited(Limits(rules_dots=3)):
        assert limits().rules_dots == 3
    assert limits() == Limits()


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "1.5G", "json_bytes=3", "1P", "4I", "4IB"])
def test_invalid_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(CkptError, match="not a size") as refused:
        with_memory(text)
    assert "--max-memory 4G" in refused.value.hint


def test_limit_named_by_the_error_can_be_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    line = ["inspect", str(tmp_path / "w.pt")]
    assert main([*line, "--max-memory", "96"]) == 2
    error = capfd.readouterr().err
    assert "the limit pickle_bytes is 96 (--max-memory 192 raises it)" in error
    size = "96"
    while main([*line, "--max-memory", size]) == 2:
        size = capfd.readouterr().err.partition("(--max-memory ")[2].partition(" raises it)")[0]
    assert main(line) == 0
    assert limits() == Limits()


@pytest.mark.parametrize("command", ["inspect", "diff", "remap"])
def test_pipe_without_a_writer_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    os.mkfifo(tmp_path / "w.pt")
    start = time.monotonic()
    rest = {
        "inspect": [],
        "diff": [str(tmp_path / "w.pt")],
        "remap": ["-o", str(tmp_path / "o.pt")],
    }[command]
    assert main([command, str(tmp_path / "w.pt"), *rest]) == 2
    assert time.monotonic() - start < MAX_SECONDS
    assert "it is a pipe, not a file" in capfd.readouterr().err


def test_terminal_and_endless_device_are_refused() -> None:
    controller, terminal = pty.openpty()
    for path in (os.ttyname(terminal), "/dev/zero"):
        with pytest.raises(CkptError, match="a terminal or another device"):
            open_checkpoint(path)
    os.close(controller)
    os.close(terminal)


def test_rules_file_may_be_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "rules"
    os.mkfifo(pipe)
    writer = Thread(target=lambda: pipe.write_text("[[rule]]\nrename = 'a => b'\n"))
    reader = os.open(pipe, os.O_RDWR)  # so that the writer does not block
    writer.start()
    writer.join()
    with pytest.raises(CkptError, match="it is a pipe, not a file"), opened(str(pipe)):
        pass
    with opened(str(pipe), pipes=True) as file:
        os.close(reader)
        assert file.read() == b"[[rule]]\nrename = 'a => b'\n"


DOTTED = {
    "a name": "a." * 50_000 + "a = 1",
    "a header": "[" + "a." * 50_000 + "a]",
    "in a table": "x = {" + "a." * 50_000 + "a = 1}",
    "many": "\n".join("a." * 200 + f"b{i} = 1" for i in range(250)),
    "quoted": '"a".' * 25_000 + "a = 1",
}


@pytest.mark.parametrize("name", DOTTED)
def test_deeply_dotted_toml_is_refused_quickly(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.toml").write_text(DOTTED[name])
    start = time.monotonic()
    with pytest.raises(CkptError, match="the limit rules_dots is 100"):
        read_rules(str(tmp_path / "r.toml"))
    assert time.monotonic() - start < MAX_SECONDS


def test_dots_in_strings_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(f"[[rule]]\nrename = '{'a.' * 500}a => b'\n")
    assert len(read_rules(str(tmp_path / "r.toml"))) == 1


def test_rules_file_over_the_size_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(CkptError, match="the limit rules_bytes is 1,048,576"):
        read_rules(str(tmp_path / "r.toml"))


@contextmanager
def server(answer: bytes, forever: bytes, closes: bool = True) -> Iterator[str]:
    """Run a web server that answers GET with `answer`, then sends `forever` until the client
    disconnects.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.2)
    stopped: list[bool] = []

    def talk(connection: socket.socket) -> None:
        with connection:
            request = connection.recv(65536)
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\nAccept-Ranges: bytes\r\n\r\n"
            connection.sendall(head if request.startswith(b"HEAD") else answer)
            while not request.startswith(b"HEAD") and not stopped:
                if forever:
                    connection.sendall(forever)
                else:
                    time.sleep(0.05)

    def serve() -> None:
        while not stopped:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            try:
                talk(connection)
            except OSError:
                continue

    thread = Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/w.safetensors"
    finally:
        stopped.append(True)
        thread.join()
        listening.close()


PARTIAL = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-131071/1000000\r\n\r\n"


@NEEDS_HTTP
@pytest.mark.parametrize(
    "head", [PARTIAL, b"HTTP/1.1 200 OK\r\n\r\n"], ids=["partial response", "full response"]
)
def test_endless_response_is_refused(head: bytes) -> None:
    tracemalloc.start()
    with (
        server(head, b"\0" * 65536) as url,
        pytest.raises(CkptError, match="sends more than the 131,072 requested bytes"),
    ):
        open_checkpoint(url)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@NEEDS_HTTP
def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # bytes per second, so the size adds little time
    monkeypatch.setattr("ckpttool.io.remote._SLOWEST", 1e6)
    start = time.monotonic()
    quick = Limits(remote_seconds=1)
    with (
        limited(quick),
        server(PARTIAL, b"") as url,
        pytest.raises(CkptError, match="the limit remote_seconds is 1"),
    ):
        open_checkpoint(url)
    assert time.monotonic() - start < 3 + MAX_SECONDS
