"""MODEL operands: each form is loaded, and each failure is one error with a location and a hint."""

from __future__ import annotations

import io
import logging
import os
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
import hook_zoo
from ckpttool import CkptError
from ckpttool.tracing.build_model import LoadedModel, load, of_object
from ckpttool.tracing.trace import trace
from ckpttool.tracing.user_code import logs_as_warnings, prints_once, raised_at, short_path
from command import Run
from loading_zoo import ZOO


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a module to the working directory and returns its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    numbers = iter(range(1000))

    def write(code: str, name: str | None = None) -> Path:
        path = tmp_path / (
            name or f"user_{os.getpid()}_{tmp_path.name.replace('-', '_')}_{next(numbers)}.py"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
        return path

    return write


def load_error(operand: str, **kwargs) -> CkptError:
    with pytest.raises(CkptError) as caught:
        load(operand, **kwargs).build()
    assert "\n" not in caught.value.message
    assert caught.value.exit_status == 2
    assert caught.value.hint
    return caught.value


FACTORY = """
    class Net(nn.Module):
        def __init__(self, width=3):
            super().__init__()
            self.layer = nn.Linear(width, width)
            self.again = nn.Linear(width, width)
            self.again.weight = self.layer.weight

        @classmethod
        def small(cls):
            return cls(width=1)

    def build(width=2):
        return Net(width)

    instance = Net()

    class Space:
        model = instance
"""


def test_each_form_of_operand_is_loaded(source) -> None:
    path = source(FACTORY)
    for attr, width in (
        ("build", 2),
        ("Net", 3),
        ("instance", 3),
        ("Net.small", 1),
        ("Space.model", 3),
    ):
        for operand in (f"{path}:{attr}", f"{path.stem}:{attr}"):
            model = load(operand).build()
            assert model.layer.weight.shape == (width, width)
            assert model.layer.weight.device.type == "meta"


def test_materialize_builds_the_same_weights_and_keeps_the_random_state(source) -> None:
    model = load(f"{source(FACTORY)}:build", {"width": 7}, materialize=True)
    state = torch.get_rng_state()
    weights = [model.build().get_parameter("layer.weight") for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert (weights[0].shape, weights[0].device.type) == ((7, 7), "cpu")
    assert weights[0] is not weights[1]
    assert torch.equal(*weights)


@pytest.mark.parametrize("real", [False, True])
def test_an_instance_is_copied_with_its_ties(source, real: bool) -> None:
    model: LoadedModel = load(f"{source(FACTORY)}:instance", materialize=real)
    one, two = model.build(), model.build()
    assert one is not two
    assert one.layer.weight is not two.layer.weight
    assert one.layer.weight is one.again.weight
    assert isinstance(one.layer.weight, nn.Parameter)
    assert one.layer.weight.device.type == ("cpu" if real else "meta")


@pytest.mark.parametrize("code", ["def factory():", "@functools.cache\n    def factory():"])
def test_a_module_that_a_factory_keeps_is_copied(source, code: str) -> None:
    path = source(f"    import functools{FACTORY}\n    {code}\n        return instance")
    model = load(f"{path}:factory", materialize=True)
    one = model.build()
    with torch.no_grad():
        one.layer.weight.fill_(5)
    one.added = nn.Linear(1, 1)
    assert not hasattr(model.build(), "added")


def test_a_cached_function_builds_on_meta_and_for_real(source) -> None:
    path = source("import functools\n@functools.lru_cache\ndef build(): return nn.Linear(2, 3)")
    model = load(f"{path}:build")
    assert [model.build(real).weight.device.type for real in (False, True, False)] == [
        "meta",
        "cpu",
        "meta",
    ]


@pytest.mark.parametrize("kept", ["made['model']", "globals()['model']"])
def test_a_model_that_was_kept_on_meta_is_refused_if_values_are_needed(source, kept: str) -> None:
    lines = [
        "made = {}",
        "def build():",
        f"    try: return {kept}",
        f"    except KeyError: {kept} = nn.Linear(2, 3)",
    ]
    path = source("\n".join([*lines, f"    return {kept}"]))
    model = load(f"{path}:build")
    assert model.build().weight.is_meta
    with pytest.raises(CkptError, match="on the meta device before") as caught:
        model.build(True)
    assert "--materialize" in caught.value.hint
    again = load(f"{source(path.read_text(), 'again.py')}:build", materialize=True)
    assert [again.build(real).weight.device.type for real in (True, True)] == ["cpu", "cpu"]


def test_a_real_model_of_the_module_is_real_after_meta(source) -> None:
    model = load(f"{source(FACTORY + chr(10) + '    def factory(): return instance')}:factory")
    assert [model.build(real).layer.weight.is_meta for real in (False, True, False)] == [
        True,
        False,
        True,
    ]


def test_objects_without_a_source_file_can_be_factories() -> None:
    assert of_object(eval("lambda: nn.Linear(1, 2)", {"nn": nn})).build().weight.shape == (2, 1)
    assert of_object(nn.Linear, {"in_features": 2, "out_features": 3}).build().weight.shape == (
        3,
        2,
    )


def test_a_file_does_not_replace_a_loaded_module(source) -> None:
    """Its classes have the module name under which users import the file, if they can."""
    import random

    for name, module in (
        ("random.py", "_ckpttool_random"),
        ("my-net.py", "_ckpttool_my-net"),
        ("a_net.py", "a_net"),
    ):
        model = load(f"{source(FACTORY, name)}:Net").build()
        assert model.layer.weight.shape == (3, 3)
        assert type(model).__module__ == module
    assert sys.modules["random"] is random


def test_prints_go_to_stderr(source, capsys: pytest.CaptureFixture[str]) -> None:
    path = source(
        "print('importing')\ndef build():\n    print('building')\n    return nn.Linear(1, 1)"
    )
    load(f"{path}:build").build()
    out, err = capsys.readouterr()
    assert out == ""
    assert "importing" in err
    assert "building" in err


def test_files_next_to_a_file_can_be_imported_later(source, tmp_path: Path) -> None:
    source("WIDTH = 5", "deep/neighbour_for_late_import.py")
    path = source(
        "def build():\n    import neighbour_for_late_import as n\n    return nn.Linear(n.WIDTH, 1)",
        "deep/a_model.py",
    )
    assert load(f"{path}:build").build().weight.shape == (1, 5)


def test_a_file_may_define_dataclasses(source) -> None:
    path = source(
        """
        import dataclasses

        @dataclasses.dataclass
        class Config:
            width: "int" = 4

        def build():
            return nn.Linear(Config().width, 1)
        """
    )
    assert load(f"{path}:build").build().weight.shape == (1, 4)


@pytest.mark.parametrize(
    "operand",
    [
        "",
        "model",
        "model:",
        ":attr",
        "model.pt:x:",
        "a b:c",
        "1model:x",
        "..:x",
        "random:a/b",
        "a/b:x",
    ],
)
def test_a_malformed_operand_is_an_error(source, operand: str) -> None:
    assert "package.module:attr" in load_error(operand).hint


def test_a_missing_file_or_module_is_an_error(source, tmp_path: Path) -> None:
    assert "no such file" in load_error("nowhere/model.py:build").message
    (tmp_path / "folder.py").mkdir()
    assert "a directory" in load_error("folder.py:build").message
    error = load_error("no_such_package_at_all.model:build")
    assert error.message == (
        "no module named 'no_such_package_at_all' (no_such_package_at_all.model)"
    )
    assert "import no_such_package_at_all.model" in error.hint
    assert load_error("no_such_package_at_all:build").message.startswith("no module named")


def test_a_missing_attribute_suggests_close_names(source) -> None:
    path = source(FACTORY)
    error = load_error(f"{path}:bild")
    assert "has no attribute 'bild'" in error.message
    assert f"{path}:build" in error.hint
    assert "build" in load_error(f"{path}:zzz").hint
    assert "has no attribute 'Net.tiny'" in load_error(f"{path}:Net.tiny").message
    assert load_error(f"{source('')}:zzz").hint == (
        "a model is package.module:attr or path/to/file.py:attr"
    )
    several = source("five = 5\nnet = nn.Linear(1, 1)\n_own = nn.Linear(1, 1)\nadd = torch.add")
    assert "has no attribute 'five.zzz'" in load_error(f"{several}:five.zzz").message
    assert load_error(f"{several}:zzz").hint.endswith(f"; did you mean {several}:net?")


def test_a_file_of_a_package_gets_a_hint_with_its_module_name(
    source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"package_{os.getpid()}"
    for folder in (name, f"{name}/deep"):
        source("", f"{folder}/__init__.py")
    path = source(
        "from . import other\ndef build():\n    return nn.Linear(1, 1)", f"{name}/deep/model.py"
    )
    source("", f"{name}/deep/other.py")
    hint = f"the file is part of a package: name it {name}.deep.model:build"
    assert load_error(f"{path}:build").hint == hint
    assert load(f"{name}.deep.model:build").build().weight.shape == (1, 1)
    monkeypatch.chdir(path.parent)
    assert load_error("model.py:build").hint == f"{hint}, in the folder {tmp_path}"


# Code with an error in its third line, the message without the operand, and a part of the hint
ERRORS = {
    "an import error": ("raise RuntimeError(1)", "RuntimeError: 1", "fix it there: the same"
    " happens in plain Python"),
    "a missing import": ("import a_missing_library", "No module named 'a_missing_library'", "needs"
    " a_missing_library"),
    "a module that is not found": ("raise ModuleNotFoundError('install it', name='a_library')", "install it", ""),
    "a module without a name": ("raise ModuleNotFoundError('install it')", "ModuleNotFoundError:"
    " install it", ""),
    "a syntax error": ("def build(:\n    pass", "SyntaxError", ""),
    "a raised syntax error": ("raise SyntaxError('odd')", "SyntaxError: odd", ""),
    "an error without a message": ("raise ValueError", "cannot be imported: ValueError", ""),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3", "__main__"),
    "an attribute that raises": ("def __getattr__(name): raise RuntimeError(name)", "RuntimeError:"
    " build", ""),
    "a function of the constructor": (
        "def helper(): raise KeyError('depth')\ndef build(): return helper()", "KeyError: 'depth'", ""),
    "an error inside torch": ("def build(): return nn.Linear('three', 1)", "TypeError", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_the_users_code_is_reported_with_its_line(source, name: str) -> None:
    code, message, hint = ERRORS[name]
    path = source(code)
    for operand in (f"{path}:build", f"{path.stem}:build"):
        error = load_error(operand)
        assert message in error.message
        assert error.message.endswith(f"({path.name}:3)")
        assert hint in error.hint


@pytest.mark.parametrize(
    "line",
    [
        "float(torch.rand(2).sum())",
        "torch.rand(2).numpy()",
        "torch.rand(2).tolist()",
        "torch.linspace(0, 1, 3).sum().item()",
        "torch.ones(2).numpy()",
        "torch.rand(3)[torch.rand(3) > 0.5]",
        "bool(torch.ones(1))",
        "torch.ones(2) + torch.ones(2, device='cpu')",
        "if torch.ones(1).is_meta: raise LookupError('width') from NotImplementedError('no meta"
        " kernel')",
    ],
)
def test_a_constructor_that_needs_values_gets_the_materialize_hint(source, line: str) -> None:
    path = source(f"def build():\n    {line}\n    return nn.Linear(1, 1)")
    error = load_error(f"{path}:build")
    assert "--materialize" in error.hint
    assert f"{path.name}:4" in error.message
    assert load(f"{path}:build", materialize=True).build().weight.shape == (1, 1)


MOVED = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            whole = torch.ones(4, 2)
            self.up, self.low = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
            self.norm = nn.BatchNorm1d(3)

    def build():
        net = Net()
        {line}
        return net
"""


@pytest.mark.parametrize(
    "line",
    [
        "net.to('cpu')",
        "net.to(torch.device('cpu'), torch.bfloat16)",
        "net.half().cpu()",
        "net.b.weight = nn.Parameter(net.a.weight.to('cpu', copy=True))",
        "net.b.bias = net.a.bias.cpu()",
        "net.to(torch.empty(1, device='cpu', dtype=torch.float64))",
        "net.up.data = net.up.data.to(device='cpu', memory_format=torch.contiguous_format)",
    ],
)
def test_a_constructor_that_moves_the_model_stays_on_meta(source, line: str) -> None:
    """On meta the same tensors are tied, overlap and have the same dtypes as for real."""
    path = source(MOVED.format(line=line))
    loaded = load(f"{path}:build")
    on_meta, real = loaded.build(), loaded.build(True)
    assert {tensor.device.type for tensor in on_meta.state_dict().values()} == {"meta"}
    assert traits(on_meta) == traits(real)


def traits(model: nn.Module) -> list[tuple[object, ...]]:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    objects = {id(tensor): name for name, tensor in reversed(tensors.items())}
    memory = {tensor.untyped_storage()._cdata: name for name, tensor in reversed(tensors.items())}
    return [
        (
            name,
            tensor.dtype,
            tensor.stride(),
            objects[id(tensor)],
            memory[tensor.untyped_storage()._cdata],
        )
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize(
    ("line", "is_renamed"),
    [
        ("net.to('cuda:1')", True),
        ("net.cuda()", False),
        ("net.to('cuda:1').to('cpu')", False),
        ("net.cuda().to('cuda:1')", True),
        ("net.cpu()", False),
        ("net.b.cuda(1)", False),
        ("net.cuda(1)", True),
        ("net.cuda(1).half()", True),
        ("net.half().cuda(1).to(torch.float64)", True),
        ("net.cuda(1).half().cpu()", False),
        ("net.cuda(device='cuda:1')", True),
    ],
)
def test_hooks_of_a_moved_model_see_its_device(source, line: str, is_renamed: bool) -> None:
    path = source(
        MOVED.format(
            line=f"""{line}
        def save(module, state, prefix, _):
            weight = module.up
            if weight.is_cuda and weight.device == torch.device('cuda:1') and weight.detach().get_device() == 1:
                state[prefix + "upper"] = state.pop(prefix + "up")
        net._register_state_dict_hook(save)"""
        )
    )
    with path.open("a") as file:
        file.write("\nimport functools\ncached = functools.lru_cache(build)\n")
    for name in ("build", "cached"):  # what a cached function returns is copied
        keys = [key.key for key in trace(load(f"{path}:{name}")).serialized]
        assert ("upper" in keys, "up" in keys) == (is_renamed, not is_renamed), name


@pytest.mark.parametrize(
    "line", ["net.cuda()", "net.to('cuda:1')", "net.half().to(device='cuda')", "net.xpu()"]
)
def test_a_model_on_a_missing_device_is_compared(
    source, run: Run, tmp_path: Path, line: str
) -> None:
    path = source(MOVED.format(line=line))
    space: dict[str, Any] = {}
    exec(path.read_text().partition("def build")[0], space)
    model = space["Net"]().half() if "half" in line else space["Net"]()
    torch.save(model.state_dict(), tmp_path / "net.pt")
    assert run("diff", tmp_path / "net.pt", "--model", f"{path}:build").status == 0
    torch.save({**model.state_dict(), "more": torch.ones(1)}, tmp_path / "more.pt")
    assert run("diff", tmp_path / "more.pt", "--model", f"{path}:build").status == 1
    assert (
        run(
            "remap",
            tmp_path / "net.pt",
            "--model",
            f"{path}:build",
            "--to",
            "runtime",
            "-o",
            tmp_path / "o.pt",
        ).status
        == 0
    )


def test_an_ordinary_failure_is_not_blamed_on_meta(source) -> None:
    path = source("def build():\n    raise ValueError('bad depth')")
    assert not load_error(f"{path}:build").hint.startswith("this constructor needs real tensors")
    assert "--materialize" not in load_error(f"{path}:build", materialize=True).hint


@pytest.mark.parametrize("value", ["3", "'text'", "[]", "{'a': 1}", "None", "torch.ones(2)"])
def test_other_objects_are_refused(source, value: str) -> None:
    path = source(f"value = {value}\ndef build():\n    return value")
    assert "is not a model" in load_error(f"{path}:value").message
    assert "not an nn.Module" in load_error(f"{path}:build").message


def test_wrong_kwargs_are_an_error(source) -> None:
    path = source(
        "def build(width, *, depth=2):\n    return nn.Linear(width, depth)\nmodel = nn.Linear(1, 1)"
    )
    error = load_error(f"{path}:build")
    assert "missing a required argument: 'width'" in error.message
    assert "width" in error.hint
    assert "build(name=1)" in error.hint
    error = load_error(f"{path}:build", kwargs={"width": 1, "heigth": 2})
    assert "heigth" in error.message
    assert "takes no arguments" in load_error(f"{path}:model", kwargs={"width": 1}).message
    assert "not an nn.Module" in load_error("builtins:dict").message


def test_a_file_that_is_not_python_is_an_error(source, tmp_path: Path) -> None:
    path = tmp_path / "weights.py"
    path.write_bytes(b"\x80\x02}q\x00(\xff\xfe")
    assert "weights.py" in load_error(f"{path}:build").message


def test_a_meta_copy_of_an_instance_keeps_overlaps(source) -> None:
    path = source(
        """
        model = nn.Module()
        whole = torch.randn(4, 6)
        model.register_buffer("whole", whole)
        model.register_buffer("part", whole[:, :3])
        model.bf16 = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        """
    )
    model = load(f"{path}:model").build()
    assert model.whole.untyped_storage()._cdata == model.part.untyped_storage()._cdata
    assert model.part.stride() == (6, 1)
    assert model.bf16.dtype == torch.bfloat16
    assert not model.bf16.requires_grad


@pytest.mark.parametrize("name", ["sparse_buffer", "quantized_buffer", "packed_weight", "lazy"])
def test_tensors_that_meta_does_not_support_are_copied(name: str) -> None:
    instance = nn.LazyLinear(2) if name == "lazy" else {**hook_zoo.ZOO, **ZOO}[name]()
    built = of_object(instance).build()
    assert built.state_dict().keys() == instance.state_dict().keys()
    kinds = [
        [(type(t), t.layout) for t in (*one.parameters(), *one.buffers())]
        for one in (built, instance)
    ]
    assert kinds[0] == kinds[1]


def test_an_error_in_a_package_names_the_users_line(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with pytest.raises(FileNotFoundError) as caught:
        load_file(tmp_path / "none")
    assert (raised_at(caught.tb) or "").rpartition(":")[0] == short_path(__file__)


def test_a_line_is_printed_once_even_without_a_newline(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with prints_once():
            print("one of a test")
            print("two of", end=" a test")
    assert capsys.readouterr() == ("", "one of a test\ntwo of a test\n")


def test_a_model_is_built_in_the_folder_that_its_import_chose(source, tmp_path: Path) -> None:
    code = """
        import os
        from pathlib import Path
        from torch import nn
        os.chdir(os.path.dirname(__file__))
        def build():
            size = int(Path("size").read_text())
            os.chdir("deeper")
            return nn.Linear(size, size)
    """
    path = source(code, "project/moving.py")
    (tmp_path / "project" / "deeper").mkdir()
    (tmp_path / "project" / "size").write_text("3")
    model = load(f"{path.relative_to(tmp_path)}:build")
    assert [model.build(False).in_features for _ in range(2)] == [3, 3]
    assert Path.cwd() == tmp_path


def test_an_import_may_end_in_a_folder_that_is_deleted(source, run: Run, tmp_path: Path) -> None:
    path = source("""
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        def build():
            return nn.Linear(2, 2)
    """)
    torch.save(nn.Linear(2, 2).state_dict(), "linear.pt")
    assert run("diff", "--model", f"{path}:build", "linear.pt").status == 0
    assert Path.cwd() == tmp_path


def test_the_folder_of_an_import_may_be_deleted_later(source, run: Run, tmp_path: Path) -> None:
    path = source("""
        import os
        os.mkdir("deeper")
        os.chdir("deeper")
        def build():
            return nn.Linear(2, 2)
    """)
    assert run("trace", f"{path}:build").status == 0
    (tmp_path / "deeper").rmdir()
    assert run("trace", f"{path}:build").status == 0
    assert Path.cwd() == tmp_path


LIKE_OURS = [f"{Path(torch.__file__).parent}vision", f"{Path(ckpttool.__file__).parent}_exp"]


@pytest.mark.parametrize("folder", LIKE_OURS)
def test_an_error_names_a_folder_whose_name_begins_like_that_of_torch(
    source, run: Run, folder: str
) -> None:
    path = source(f"""
        text = "def make(): raise ValueError('no weights')"
        exec(compile(text, "{folder}/made.py", "exec"))
        build = make
    """)
    result = run("trace", f"{path}:build")
    assert result.status == 2
    assert f"ValueError: no weights ({folder}/made.py:1)" in result.err


def test_two_threads_that_build_leave_the_process_as_it_was() -> None:
    def state() -> tuple[object, ...]:
        descriptor = os.fstat(1)
        return os._exit, Path.cwd(), descriptor.st_dev, descriptor.st_ino

    before, first, both = state(), threading.Event(), threading.Event()

    def build() -> nn.Module:
        if first.is_set():  # the second thread is inside, and stays longer
            both.set()
            time.sleep(0.2)
        else:
            first.set()
            both.wait(10)
        return nn.Linear(1, 1)

    threads = [threading.Thread(target=of_object(build).build, args=(False,)) for _ in range(2)]
    threads[0].start()
    assert first.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert both.is_set()
    assert state() == before


@pytest.mark.parametrize("call", ["sys.exit()", "os._exit(0)"])
def test_a_function_that_exits_is_not_taken_for_a_module_that_exits(source, call: str) -> None:
    path = source(f"import os, sys\nbuild = lambda: {call}\n")
    with pytest.raises(CkptError, match="cannot be built: SystemExit") as caught:
        load(f"{path}:build").build(True)
    assert "does not parse a command line or exit" in (caught.value.hint or "")


def test_logged_warnings_become_warnings_and_info_does_not() -> None:
    log, stream = logging.getLogger("torch.of_a_test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught, logs_as_warnings():
            warnings.simplefilter("always")
            log.info("information")
            log.warning("warning")
        log.warning("later")
    finally:
        log.removeHandler(handler)
    assert [str(one.message) for one in caught] == ["warning"]
    assert stream.getvalue() == "information\nlater\n"
