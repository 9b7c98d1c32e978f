"""AOTInductor packages: weights next to the compiled code are read and swapped, weights inside it
are refused.
"""

from __future__ import annotations

import json
import shlex
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Refused, Swap, open_checkpoint, swap_weights
from command import Run
from surroundings import limited
from torch_version import needs_torch

OUTSIDE = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="AOTInductor needs a C++ compiler",
)


class Model(nn.Module):
    """Tied, shared and transposed weights, a small bias that is inlined, a non-persistent buffer,
    and a constant.
    """

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        whole = torch.randn(4, 4)
        self.up, self.low = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.register_buffer("fixed", torch.arange(12.0), persistent=False)
        with torch.no_grad():
            self.b.bias.fill_(0.5)

    def forward(self, x):
        x = self.b(torch.relu(self.a(x))) + self.up.sum(0) * self.low.prod(0) + self.turned.sum(0)
        return x + self.fixed.sum() * torch.tensor([[0.5, 2.0, 1.0, 3.0]] * 4)[:2]


def build() -> nn.Module:
    return Model(0)


def compiled(path: Path, config: dict[str, object]) -> str:
    program = torch.export.export(Model(0).eval(), (torch.ones(2, 4),))
    return torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=config
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> str:
    needs_torch("2.9", "weights next to the code of a package")
    return compiled(tmp_path_factory.mktemp("aoti") / "outside.pt2", OUTSIDE)


def outputs_of(path: str, x: torch.Tensor) -> torch.Tensor:
    from torch.export.pt2_archive._package import load_pt2

    return load_pt2(path, load_weights_from_disk=True).aoti_runners["model"](x)


@needs_compiler
def test_weights_next_to_the_code_are_read(package):
    checkpoint = open_checkpoint(package)
    assert checkpoint.format == "pt2"
    state = Model(0).state_dict()
    with zipfile.ZipFile(package) as archive:
        config = json.loads(archive.read("outside/data/aotinductor/model/weights_config.json"))
    section, constants = checkpoint.sections
    (constant,) = constants.tensors
    assert [*(entry.key for entry in section.tensors), constant.key] == list(config)
    assert constant.shape == (4, 4)
    for entry in section.tensors:
        if entry.key == "fixed":
            continue
        tensor = state[entry.key]
        raw = Path(package).read_bytes()[entry.storage.data.offset :][: entry.storage.data.length]
        flat = torch.frombuffer(bytearray(raw), dtype=tensor.dtype)
        assert torch.equal(flat.as_strided(entry.shape, entry.stride, entry.offset), tensor)
    container: Any = checkpoint.container
    assert container.layout == "AOTInductor"
    assert "small ones" in checkpoint.notes[0]


@needs_compiler
def test_source_that_is_too_long_is_not_read(package):
    """Without the source, constants cannot be distinguished from weights."""
    with limited(json_bytes=20_000):
        section, *constants = open_checkpoint(package).sections
    names = {
        entry.key for section in open_checkpoint(package).sections for entry in section.tensors
    }
    assert ({entry.key for entry in section.tensors}, constants) == (names, [])


@needs_compiler
def test_swapped_weights_give_the_outputs_of_the_new_model(
    package: str, run: Run, tmp_path: Path
) -> None:
    old, new = Model(0).eval(), Model(1).eval()
    torch.save(
        {key: value for key, value in new.state_dict().items() if key != "b.bias"},
        tmp_path / "new.pt",
    )
    options = ("--verify", "--model", f"{__file__}:build", "--format", "json")
    done = run("swap-weights", package, tmp_path / "new.pt", "-o", tmp_path / "out.pt2", *options)
    assert done.status == 0, done.err
    assert (done.data["kept"], len(done.data["constants"])) == (["fixed"], 1)
    for x in (torch.ones(2, 4), torch.randn(2, 4)):
        assert torch.allclose(outputs_of(package, x), old(x), atol=1e-5)
        assert torch.allclose(outputs_of(str(tmp_path / "out.pt2"), x), new(x), atol=1e-5)


@needs_compiler
def test_an_inlined_weight_is_refused(package, run: Run, tmp_path):
    torch.save(Model(1).state_dict(), tmp_path / "new.pt")
    with pytest.raises(Refused) as caught:
        swap_weights(package, str(tmp_path / "new.pt"), str(tmp_path / "out.pt2"))
    problems = {problem.key: problem.problem for problem in caught.value.problems}
    assert problems.pop("b.bias") == (
        "4 elements: written into the compiled code, and cannot be swapped"
    )
    assert problems == {"fixed": "missing weight"}  # only the model knows that it is not saved
    assert "in the compiled code itself" in caught.value.hint
    command = shlex.split(caught.value.hint.rpartition(": ")[2])
    words = {"NEW": tmp_path / "new.pt", "KEY": "b.bias", "OUT": tmp_path / "used.pt"}
    assert run(*(words.get(word, word) for word in command[1:])).status == 0
    names = ckpttool.trace(build)
    swap_weights(package, str(tmp_path / "used.pt"), str(tmp_path / "out.pt2"), model=names)
    state = {**Model(1).state_dict(), "spare": torch.ones(3, 3)}
    torch.save(
        {key: value for key, value in state.items() if key != "b.bias"}, tmp_path / "spare.pt"
    )
    with pytest.raises(Refused) as caught:
        swap_weights(package, str(tmp_path / "spare.pt"), str(tmp_path / "spare.pt2"), model=names)
    assert [str(problem) for problem in caught.value.problems] == [
        "unexpected: the compiled code does not use it @ spare"
    ]


@needs_compiler
@pytest.mark.parametrize(
    "config",
    [
        {},
        {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.package_constants_on_disk_format": "binary_blob",
        },
    ],
)
def test_weights_inside_the_code_are_refused_with_a_hint(
    run: Run, tmp_path: Path, config: dict[str, object]
) -> None:
    needs_torch("2.9", "weights next to the code of a package")
    path = compiled(tmp_path / "inside.pt2", config)
    checkpoint = open_checkpoint(path)
    assert checkpoint.sections == ()
    assert "package_constants_on_disk_format" in checkpoint.notes[0]
    torch.save(Model(1).state_dict(), tmp_path / "new.pt")
    done = run("swap-weights", path, tmp_path / "new.pt", "-o", tmp_path / "out.pt2")
    assert (done.status, "package_constants_on_disk_format" in done.err) == (1, True)
    assert not (tmp_path / "out.pt2").exists()
    assert_is_no_model(run, path, tmp_path / "new.pt")


def assert_is_no_model(run: Run, package: str, checkpoint: Path) -> None:
    for words in (["trace", package], ["diff", checkpoint, "--model", package]):
        done = run(*words)
        assert done.status == 2
        assert f"{package} is compiled code, which does not say how" in done.err


@needs_compiler
def test_compiled_code_with_weights_is_no_model(package, run: Run, tmp_path: Path) -> None:
    torch.save(Model(1).state_dict(), tmp_path / "new.pt")
    assert_is_no_model(run, package, tmp_path / "new.pt")


# Packages built by hand, without a compiler


def archive(path: Path, configs: dict[str, object], weights: dict[str, object], *more: str) -> str:
    with zipfile.ZipFile(path, "w") as out:
        for name, config in configs.items():
            out.writestr(f"p/data/aotinductor/{name}/m.wrapper.so", b"\x7fELF")
            text = config if isinstance(config, bytes) else json.dumps(config).encode()
            out.writestr(f"p/data/aotinductor/{name}/weights_config.json", text)
        for name, value in weights.items():
            with out.open(f"p/data/weights/{name}", "w") as record:
                torch.save(value, record)
        for name in more:
            out.writestr(f"p/{name}", b"" if name.endswith("/") else b"{}")
    return str(path)


ONE = {"w": ["weight_0", [2, 2], [2, 1], 0]}


def swap_ones(path: str, folder: Path, program: str) -> Swap:
    """Give one program of the file new weights, and write the result to `out.pt2`."""
    torch.save({"w": torch.full((2, 2), 7.0)}, folder / "new.pt")
    out = str(folder / "out.pt2")
    return swap_weights(f"{path}::{program}", str(folder / "new.pt"), out)


class Twice(nn.Module):
    """A weight with two names, of which compiled code has one, and a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.w = self.again = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("fixed", torch.ones(2, 2), persistent=False)


@pytest.mark.parametrize(
    ("state", "problems"),
    [
        ({}, []),
        ({"again": torch.full((2, 2), 7.0)}, []),
        ({"again": torch.ones(2, 2)}, ["tied to w, but its new value differs @ again"]),
        ({"fixed": torch.zeros(2, 2)}, []),
        ({"note": "a word"}, ["unexpected: not a weight of the program @ note"]),
    ],
)
def test_swap_accepts_names_that_compiled_code_lacks(tmp_path, state, problems):
    two: dict[str, object] = {
        name: [f"weight_{at}", [2, 2], [2, 1], 0] for at, name in enumerate(("w", "fixed"))
    }
    values: dict[str, object] = {f"weight_{at}": torch.ones(2, 2) for at in (0, 1)}
    path = archive(tmp_path / "p.pt2", {"model": two}, values)
    torch.save({"w": torch.full((2, 2), 7.0), **state}, tmp_path / "new.pt")
    out = str(tmp_path / "out.pt2")
    operands = (path, str(tmp_path / "new.pt"), out)
    names = ckpttool.trace(Twice)
    if problems:
        with pytest.raises(Refused) as caught:
            swap_weights(*operands, model=names, from_="runtime")
        assert [str(problem) for problem in caught.value.problems] == problems
        return
    done = swap_weights(*operands, model=names, from_="runtime")
    assert (set(done.sources), done.kept) == (
        {"w", "fixed"} & {"w", *state},
        () if "fixed" in state else ("fixed",),
    )
    with zipfile.ZipFile(out) as written:
        assert torch.equal(
            torch.load(written.open("p/data/weights/weight_0")), torch.full((2, 2), 7.0)
        )
        assert torch.equal(
            torch.load(written.open("p/data/weights/weight_1")),
            state.get("fixed", torch.ones(2, 2)),
        )


def test_weights_shared_with_another_model_are_refused(tmp_path):
    path = archive(tmp_path / "p.pt2", {"cpu": ONE, "cuda": ONE, "own": {"w": ["weight_1", [2, 2], [2, 1], 0]}},
                   {"weight_0": torch.ones(2, 2), "weight_1": torch.ones(2, 2)})  # fmt: skip
    assert [section.path for section in open_checkpoint(path).sections] == ["cpu", "cuda", "own"]
    with pytest.raises(Refused) as caught:
        swap_ones(path, tmp_path, "cpu")
    assert [str(p) for p in caught.value.problems] == [
        "the weights of cuda too @ p/data/weights/weight_0"
    ]
    swap_ones(path, tmp_path, "own")
    with zipfile.ZipFile(tmp_path / "out.pt2") as written:
        assert torch.load(written.open("p/data/weights/weight_1"))[1, 1] == 7
        assert torch.load(written.open("p/data/weights/weight_0"))[1, 1] == 1


def test_a_model_without_weights_does_not_prevent_a_swap(tmp_path):
    more = ("data/aotinductor/", "data/aotinductor/inside/m.wrapper.so")
    path = archive(tmp_path / "p.pt2", {"cpu": ONE}, {"weight_0": torch.ones(2, 2)}, *more)
    assert "2 programs: cpu, inside" in open_checkpoint(path).notes
    swap_ones(path, tmp_path, "cpu")
    with zipfile.ZipFile(tmp_path / "out.pt2") as written:
        assert torch.load(written.open("p/data/weights/weight_0"))[1, 1] == 7


def test_a_rename_of_compiled_weights_is_refused(tmp_path):
    path = archive(tmp_path / "p.pt2", {"model": ONE}, {"weight_0": torch.ones(2, 2)})
    with pytest.raises(Refused) as caught:
        ckpttool.remap(path, str(tmp_path / "out.pt2"), rule="w => v")
    assert [str(p) for p in caught.value.problems] == [
        "compiled code calls its weights by the names that they have @ w"
    ]


def test_the_source_identifies_constants(tmp_path):
    path = archive(
        tmp_path / "p.pt2", {"model": {**ONE, "c": ONE["w"]}}, {"weight_0": torch.ones(2, 2)}
    )
    source = (
        "constants_info_[0].type ="
        " static_cast<int32_t>(torch::aot_inductor::ConstantType::Parameter);\n"
        'constants_info_[0].original_fqn = "w";\n'
        "constants_info_[1].type ="
        " static_cast<int32_t>(torch::aot_inductor::ConstantType::TensorConstant);\n"
        'constants_info_[1].original_fqn = "c";\n'
    )
    with zipfile.ZipFile(path, "a") as out:
        out.writestr("p/data/aotinductor/model/m.wrapper.cpp", source)
    for most, keys in ((len(source), [["w"], ["c"]]), (len(source) - 1, [["w", "c"]])):
        with limited(json_bytes=most):
            assert [section.keys for section in open_checkpoint(path).sections] == keys


@pytest.mark.parametrize("shape", [(), (1,), (8,), (9,), (1, 1), (2, 4)])
def test_inlined_constants_match_torch(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from torch._inductor.graph import GraphLowering

    is_inlined = shape == () or GraphLowering.can_inline_constant(torch.zeros(shape))
    path = archive(tmp_path / "p.pt2", {"model": ONE}, {"weight_0": torch.ones(2, 2)})
    torch.save({"w": torch.ones(2, 2), "small": torch.zeros(shape)}, tmp_path / "new.pt")
    with pytest.raises(Refused) as caught:
        swap_weights(path, str(tmp_path / "new.pt"), str(tmp_path / "out.pt2"))
    (problem,) = caught.value.problems
    assert problem.key == "small"
    assert ("written into the compiled code" in problem.problem) == is_inlined


def test_an_exported_program_next_to_the_code_is_refused(tmp_path):
    path = archive(tmp_path / "p.pt2", {"cpu": ONE}, {"weight_0": torch.ones(2, 2)}, "models/model.json",
                   "data/weights/model_weights_config.json", "data/constants/model_constants_config.json")  # fmt: skip
    with pytest.raises(CkptError, match="not as torch"):
        open_checkpoint(path)
    with pytest.raises(Refused) as caught:
        swap_ones(path, tmp_path, "cpu")
    assert "the exported program in the file" in caught.value.problems[0].problem


@pytest.mark.parametrize(
    "config",
    [
        b"", b"[]", b"[1]", b"\xff", 7, {"w": []}, {"w": 7}, {"w": None}, {"w": ["weight_9", [2], [1], 0]},
        {"w": ["../x", [2], [1], 0]}, {"w": ["weight_0", [2, 3], [3, 1], 0]}, {"w": ["weight_0", [2, 2], [2, 1], 1]},
        {"w": ["weight_0", [2, 2], [2], 0]}, {"w": ["weight_0", [-2, 2], [2, 1], 0]}, {"w": ["weight_0", 3, 4, 0]},
        {"w": ["weight_0", [2.0], [1], 0]}, {"w": ["weight_0", [2], [1], 0, 0]}, {"w": ["weight_0", [2**62], [9], 0]},
        {"w": ["text", [2], [1], 0]}, {"w": ["weight_0", [2], [2, 1], 0]}, {"w": ["sparse", [2, 2], [2, 1], 0]},
        {"w": [["weight_0"], [2], [1], 0]},
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused(tmp_path, config):
    weights = {"weight_0": torch.ones(2, 2), "text": {"a": 1}, "sparse": torch.eye(2).to_sparse()}
    path = archive(tmp_path / "p.pt2", {"model": config}, weights)
    with pytest.raises(CkptError) as caught:
        open_checkpoint(path)
    assert caught.value.exit_status == 2
    again = archive(
        tmp_path / "q.pt2", {"other": ONE, "model": config}, {"weight_0": torch.ones(2, 2)}
    )
    with pytest.raises(CkptError):
        swap_ones(again, tmp_path, "model")
