"""MODEL operands: what each form gives, and that every way to fail is one error that says where and what to do."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import hook_zoo
from ckpttool.core.errors import CkptError
from ckpttool.tracing.build_model import LoadedModel, load, of_object, raised_at, short_path
from loading_zoo import ZOO


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module into the working directory; gives its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    numbers = iter(range(1000))

    def write(code: str, name: str | None = None) -> Path:
        path = tmp_path / (name or f"user_{os.getpid()}_{tmp_path.name.replace('-', '_')}_{next(numbers)}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
        return path

    return write


def fails(operand: str, **kwargs) -> CkptError:
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


def test_function_class_instance_and_dotted_attribute(source) -> None:
    path = source(FACTORY)
    for attr, width in (("build", 2), ("Net", 3), ("instance", 3), ("Net.small", 1), ("Space.model", 3)):
        for operand in (f"{path}:{attr}", f"{path.stem}:{attr}"):
            model = load(operand).build()
            assert model.layer.weight.shape == (width, width)
            assert model.layer.weight.device.type == "meta"


def test_kwargs(source) -> None:
    assert load(f"{source(FACTORY)}:build", {"width": 7}).build().layer.weight.shape == (7, 7)


def test_materialize_gives_the_same_real_weights_each_time(source) -> None:
    model = load(f"{source(FACTORY)}:build", materialize=True)
    one, two = model.build(), model.build()
    assert one is not two
    weights = [built.get_parameter("layer.weight") for built in (one, two)]
    assert weights[0].device.type == "cpu"
    assert torch.equal(*weights)


def test_building_leaves_the_random_state_alone(source) -> None:
    model = load(f"{source(FACTORY)}:build", materialize=True)
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    model.build()
    assert torch.equal(torch.rand(1), wanted)


@pytest.mark.parametrize("real", [False, True])
def test_an_instance_is_copied_with_its_ties(source, real: bool) -> None:
    model: LoadedModel = load(f"{source(FACTORY)}:instance", materialize=real)
    one, two = model.build(), model.build()
    assert one is not two
    assert one.layer.weight is not two.layer.weight
    assert one.layer.weight is one.again.weight
    assert isinstance(one.layer.weight, nn.Parameter)
    assert one.layer.weight.device.type == ("cpu" if real else "meta")


def test_the_global_module_of_a_factory_is_copied(source) -> None:
    model = load(f"{source(FACTORY + '    def same():' + chr(10) + '        return instance')}:same", materialize=True)
    one = model.build()
    with torch.no_grad():
        one.layer.weight.fill_(5)
    one.added = nn.Linear(1, 1)
    assert not hasattr(model.build(), "added")


def test_the_cached_module_of_a_factory_is_copied(source) -> None:
    code = "    import functools" + FACTORY.replace("def build", "@functools.lru_cache\n    def build")
    model = load(f"{source(code)}:build", materialize=True)
    one = model.build()
    assert model.build() is not one


def test_a_factory_of_no_module_and_its_arguments() -> None:
    assert of_object(eval("lambda: nn.Linear(1, 2)", {"nn": nn})).build().weight.shape == (2, 1)
    assert of_object(nn.Linear, {"in_features": 2, "out_features": 3}).build().weight.shape == (3, 2)
    assert "not an nn.Module" in fails("builtins:dict").message


def test_a_file_does_not_replace_a_loaded_module(source) -> None:
    """Nor is a name wanted that an import could have."""
    import random

    path = source("def build():\n    return nn.Linear(1, 1)", "random.py")
    assert load(f"{path}:build").build().weight.shape == (1, 1)
    assert sys.modules["random"] is random
    assert load(f"{source(path.read_text(), 'my-model.py')}:build").build().weight.shape == (1, 1)


def test_a_class_of_a_file_has_the_name_that_its_pickles_have(source) -> None:
    """As where the file is imported by those who saved with it."""
    path = source(FACTORY)
    assert type(load(f"{path}:Net").build()).__module__ == path.stem
    odd = source(FACTORY, "my-net.py")
    assert type(load(f"{odd}:Net").build()).__module__ == "_ckpttool_my-net"


def test_an_import_error_does_not_mention_meta(source) -> None:
    assert fails(f"{source('raise RuntimeError(1)')}:build").hint == "fix it there: the same happens in plain Python"


def test_prints_go_to_stderr(source, capsys: pytest.CaptureFixture[str]) -> None:
    path = source("print('importing')\ndef build():\n    print('building')\n    return nn.Linear(1, 1)")
    load(f"{path}:build").build()
    out, err = capsys.readouterr()
    assert out == ""
    assert "importing" in err
    assert "building" in err


def test_files_next_to_a_file_can_be_imported_later(source, tmp_path: Path) -> None:
    source("WIDTH = 5", "deep/neighbour_for_late_import.py")
    path = source(
        "def build():\n    import neighbour_for_late_import as n\n    return nn.Linear(n.WIDTH, 1)", "deep/a_model.py"
    )
    assert load(f"{path}:build").build().weight.shape == (1, 5)


def test_dataclasses_in_a_file(source) -> None:
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
    "operand", ["", "model", "model:", ":attr", "model.pt:x:", "a b:c", "1model:x", "..:x", "random:a/b", "a/b:x"]
)
def test_malformed_operands(source, operand: str) -> None:
    assert "package.module:attr" in fails(operand).hint


def test_missing_file_directory_and_module(source, tmp_path: Path) -> None:
    assert "no such file" in fails("nowhere/model.py:build").message
    (tmp_path / "folder.py").mkdir()
    assert "a directory" in fails("folder.py:build").message
    error = fails("no_such_package_at_all.model:build")
    assert error.message == "no module named 'no_such_package_at_all' (no_such_package_at_all.model)"
    assert "import no_such_package_at_all.model" in error.hint
    assert fails("no_such_package_at_all:build").message.startswith("no module named")


@pytest.mark.parametrize("name", ["'a_library'", "None"])
def test_a_module_that_raises_module_not_found(source, name: str) -> None:
    path = source(f"raise ModuleNotFoundError('install it', name={name})")
    assert fails(f"{path.stem}:build").message.startswith(f"{path.stem} cannot be imported: ModuleNotFoundError")


def test_missing_attribute_names_close_ones(source) -> None:
    path = source(FACTORY)
    error = fails(f"{path}:bild")
    assert "has no attribute 'bild'" in error.message
    assert f"{path}:build" in error.hint
    assert "build" in fails(f"{path}:zzz").hint
    assert "has no attribute 'Net.tiny'" in fails(f"{path}:Net.tiny").message
    assert fails(f"{source('')}:zzz").hint == "a model is package.module:attr or path/to/file.py:attr"
    several = source("five = 5\nnet = nn.Linear(1, 1)\n_own = nn.Linear(1, 1)\nadd = torch.add")
    assert "has no attribute 'five.zzz'" in fails(f"{several}:five.zzz").message
    assert fails(f"{several}:zzz").hint.endswith(f"; did you mean {several}:net?")


def test_a_file_of_a_package_gets_a_hint_with_its_module_name(
    source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"package_{os.getpid()}"
    for folder in (name, f"{name}/deep"):
        source("", f"{folder}/__init__.py")
    path = source("from . import other\ndef build():\n    return nn.Linear(1, 1)", f"{name}/deep/model.py")
    source("", f"{name}/deep/other.py")
    hint = f"the file is part of a package: name it {name}.deep.model:build"
    assert fails(f"{path}:build").hint == hint
    assert load(f"{name}.deep.model:build").build().weight.shape == (1, 1)
    monkeypatch.chdir(path.parent)
    assert fails("model.py:build").hint == f"{hint}, in the folder {tmp_path}"


def test_a_missing_import_of_the_user(source) -> None:
    path = source("import a_library_that_is_not_installed")
    error = fails(f"{path}:build")
    assert "No module named 'a_library_that_is_not_installed'" in error.message
    assert f"{path.name}:3" in error.message
    assert "needs a_library_that_is_not_installed" in error.hint
    assert "needs a_library_that_is_not_installed" in fails(f"{path.stem}:build").hint


def test_syntax_error(source) -> None:
    path = source("def build(:\n    pass")
    message = fails(f"{path}:build").message
    assert "SyntaxError" in message
    assert message.endswith(f"({path.name}:3)")
    by_hand = source("raise SyntaxError('odd')")
    assert fails(f"{by_hand}:build").message.endswith(f"SyntaxError: odd ({by_hand.name}:3)")


def test_an_error_without_a_message(source) -> None:
    path = source("raise ValueError")
    assert fails(f"{path}:build").message.endswith(f"cannot be imported: ValueError ({path.name}:3)")


def test_exit_at_import(source) -> None:
    error = fails(f"{source('import sys' + chr(10) + 'sys.exit(3)')}:build")
    assert "SystemExit: 3" in error.message
    assert "__main__" in error.hint


def test_error_in_the_constructor_says_where(source) -> None:
    path = source("def helper():\n    raise KeyError('depth')\ndef build():\n    return helper()")
    error = fails(f"{path}:build")
    assert "KeyError: 'depth'" in error.message
    assert f"{path.name}:4" in error.message


def test_error_inside_torch_says_the_users_line(source) -> None:
    path = source("def build():\n    return nn.Linear('three', 1)")
    error = fails(f"{path}:build")
    assert "TypeError" in error.message
    assert f"{path.name}:4" in error.message


@pytest.mark.parametrize(
    "line",
    [
        "float(torch.rand(2).sum())",
        "torch.rand(2).numpy()",
        "torch.rand(2).tolist()",
        "torch.linspace(0, 1, 3).sum().item()",
        "torch.ones(2).to('cpu')",
        "torch.rand(3)[torch.rand(3) > 0.5]",
        "bool(torch.ones(1))",
        "torch.ones(2) + torch.ones(2, device='cpu')",
        "if torch.ones(1).is_meta: raise LookupError('width') from NotImplementedError('no meta kernel')",
    ],
)
def test_constructor_that_needs_values_is_told_to_materialize(source, line: str) -> None:
    path = source(f"def build():\n    {line}\n    return nn.Linear(1, 1)")
    error = fails(f"{path}:build")
    assert "--materialize" in error.hint
    assert f"{path.name}:4" in error.message
    assert load(f"{path}:build", materialize=True).build().weight.shape == (1, 1)


def test_an_ordinary_failure_is_not_blamed_on_meta(source) -> None:
    path = source("def build():\n    raise ValueError('bad depth')")
    assert not fails(f"{path}:build").hint.startswith("this constructor needs real tensors")
    assert "--materialize" not in fails(f"{path}:build", materialize=True).hint


@pytest.mark.parametrize("value", ["3", "'text'", "[]", "{'a': 1}", "None", "torch.ones(2)"])
def test_not_a_module(source, value: str) -> None:
    path = source(f"thing = {value}\ndef build():\n    return thing")
    assert "is not a model" in fails(f"{path}:thing").message
    assert "not an nn.Module" in fails(f"{path}:build").message


def test_wrong_kwargs(source) -> None:
    path = source("def build(width, *, depth=2):\n    return nn.Linear(width, depth)\nmodel = nn.Linear(1, 1)")
    error = fails(f"{path}:build")
    assert "missing a required argument: 'width'" in error.message
    assert "width" in error.hint
    assert "build(name=1)" in error.hint
    error = fails(f"{path}:build", kwargs={"width": 1, "heigth": 2})
    assert "heigth" in error.message
    assert "takes no arguments" in fails(f"{path}:model", kwargs={"width": 1}).message


def test_a_class_that_is_not_a_module(source) -> None:
    assert "not an nn.Module" in fails(f"{source('class Config:' + chr(10) + '    pass')}:Config").message


def test_a_file_that_is_not_python(source, tmp_path: Path) -> None:
    path = tmp_path / "weights.py"
    path.write_bytes(b"\x80\x02}q\x00(\xff\xfe")
    assert "weights.py" in fails(f"{path}:build").message


def test_attribute_that_raises_when_read(source) -> None:
    path = source("def __getattr__(name):\n    raise RuntimeError(f'no {name} here')")
    assert "RuntimeError: no build here" in fails(f"{path}:build").message


def test_meta_copy_of_an_instance_keeps_overlaps(source) -> None:
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
def test_tensors_without_a_meta_twin_are_copied(name: str) -> None:
    instance = nn.LazyLinear(2) if name == "lazy" else {**hook_zoo.ZOO, **ZOO}[name]()
    built = of_object(instance).build()
    assert built.state_dict().keys() == instance.state_dict().keys()
    kinds = [[(type(t), t.layout) for t in (*one.parameters(), *one.buffers())] for one in (built, instance)]
    assert kinds[0] == kinds[1]


def test_an_error_in_a_package_names_the_users_line(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with pytest.raises(FileNotFoundError) as caught:
        load_file(tmp_path / "none")
    assert (raised_at(caught.tb) or "").rpartition(":")[0] == short_path(__file__)
