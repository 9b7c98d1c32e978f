"""Checkpoints, models, programs and optimizers of a GPU; torch is the oracle. Skipped on machines
without one.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpttool
from command import Run
from optimizer_support import same
from places import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (make gpu)"),
    pytest.mark.filterwarnings("ignore"),
]
GPU = "cuda"
State = dict[str, Any]


class Net(nn.Module):
    """A tied weight, a view, buffers of both kinds, and integers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(6, 12), nn.BatchNorm1d(12)
        self.middle, self.head = nn.Linear(12, 12), nn.Linear(12, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(24)[::2])
        self.register_buffer("fixed", torch.arange(12.0), persistent=False)
        self.norm.running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.norm(self.embed(x))) + self.table + self.fixed)


class OldNet(Net):
    """The same parameters, made in another order."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.middle = self._modules.pop("middle")  # type: ignore[assignment]


def tokens() -> torch.Tensor:
    return torch.tensor([0, 5, 3, 1], device=GPU)


def places(state: State) -> dict[str, tuple[str, Any]]:
    return {key: (str(value.device), value.stride()) for key, value in state.items()}


def equal(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[key].cpu(), right[key].cpu()) for key in left
    )


# Files


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_keep_their_device_unless_the_format_has_none(
    tmp_path: Path, run: Run, is_zip: bool
) -> None:
    state = Net().to(GPU).state_dict()
    state["on.cpu"] = torch.ones(2)
    gpu, cpu = tmp_path / "gpu.pt", tmp_path / "cpu.pt"
    torch.save(
        {"model": state, "rng": torch.cuda.get_rng_state_all()},
        gpu,
        _use_new_zipfile_serialization=is_zip,
    )
    torch.save({key: value.cpu() for key, value in state.items()}, cpu)
    assert run("diff", f"{gpu}::model", cpu, "--values").status == 0
    assert (
        run("remap", gpu, "--rule", "{rest*} => net.{rest*}", "-o", tmp_path / "new.pt").status == 0
    )
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    renamed = {key.removeprefix("net."): value for key, value in new["model"].items()}
    assert equal(renamed, state)
    assert places(renamed) == places(state)
    assert same(new["rng"], torch.cuda.get_rng_state_all())
    assert (
        run("convert", f"{gpu}::model", "--keep-aliases", "-o", tmp_path / "new.safetensors").status
        == 0
    )
    assert run("convert", tmp_path / "new.safetensors", "-o", tmp_path / "back.pt").status == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert equal(back, {key: value for key, value in state.items() if key in back})
    assert state.keys() - back.keys() <= {"head.weight"}
    assert {value.device.type for value in back.values()} == {"cpu"}


# Definitions

DEFINITIONS = {
    "moved": "return Net().cuda()",
    "in the device": 'with torch.device("cuda"):\n    return Net()',
    "by default": """
        torch.set_default_device("cuda")
        try:
            return Net()
        finally:
            torch.set_default_device(None)
    """,
    "named in each call": """
        net = Net()
        net.scale = nn.Parameter(torch.randn(3, device="cuda"))
        net.register_buffer("mask", torch.tril(torch.ones(4, 4, device="cuda")))
        return net
    """,
    "values from the GPU": """
        net = Net()
        generator = torch.Generator("cuda").manual_seed(3)
        net.scale = nn.Parameter(torch.randn(3, generator=generator, device="cuda"))
        net.register_buffer("size", torch.full((int(torch.arange(4, device="cuda").sum()),), 2.0))
        return net
    """,
    "two devices": "net = Net()\nnet.middle.to(torch.device('cuda',"
    " torch.cuda.current_device()))\nreturn net",
    "if there is one": """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Net().to(device)
    """,
    "of its capability": """
        net = Net()
        name = "fast" if torch.cuda.get_device_capability() >= (8, 0) else "slow"
        setattr(net, name, nn.Linear(2, 2, device="cuda"))
        return net
    """,
    "compiled": "return torch.compile(Net().cuda())",
    "replicated": "return nn.DataParallel(Net().cuda())",
    "a hook that asks for the device": """
        net = Net().cuda()
        def renamed(module, state, prefix, _):
            if module.middle.weight.is_cuda:
                state[prefix + "inner.weight"] = state.pop(prefix + "middle.weight")
        def back(state, prefix, *_):
            state[prefix + "middle.weight"] = state.pop(prefix + "inner.weight")
        net._register_state_dict_hook(renamed)
        net._register_load_state_dict_pre_hook(back)
        return net
    """,
    "a hook that moves to the CPU": """
        net = Net().cuda()
        def moved(module, state, prefix, _):
            for key in list(state):
                state[key] = state[key].cpu()
        net._register_state_dict_hook(moved)
        return net
    """,
}


@pytest.fixture(params=DEFINITIONS)
def definition(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    body = textwrap.indent(textwrap.dedent(DEFINITIONS[request.param]).strip(), "    ")
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport torch\nfrom torch import"
        " nn\n"
        f"from test_cuda import Net\n\ndef build():\n{body}\n"
    )
    return f"{path}:build"


def test_a_definition_on_the_gpu_is_traced_and_compared(
    definition: str, tmp_path: Path, run: Run
) -> None:
    space: State = {}
    exec(Path(definition.rpartition(":")[0]).read_text(), space)
    model = space["build"]()
    state = model.state_dict()
    random_states = torch.cuda.get_rng_state(), torch.get_rng_state()
    for real in (False, True):
        found = [key.key for key in ckpttool.trace(definition, materialize=real).serialized]
        assert found == list(state), real
        path = str(tmp_path / "net.pt")
        torch.save(state, path)
        faulty = dict(list(state.items())[1:])
        assert ckpttool.diff(path, model=definition, materialize=real).identical, real
        torch.save(faulty, path)
        assert not ckpttool.diff(path, model=definition, materialize=real).identical, real
    assert all(map(torch.equal, random_states, (torch.cuda.get_rng_state(), torch.get_rng_state())))
    torch.save({f"old.{key}": value for key, value in state.items()}, tmp_path / "old.pt")
    renamed = run(
        "remap", tmp_path / "old.pt", "--rule", "old.{rest*} => {rest*}", "-o", tmp_path / "new.pt"
    )
    assert renamed.status == 0, renamed.err
    model.load_state_dict(torch.load(tmp_path / "new.pt", weights_only=True), strict=True)


def test_a_large_model_on_the_gpu_takes_no_memory_there(tmp_path: Path) -> None:
    """A model of 256 GiB that moves itself to the GPU."""
    (tmp_path / "large.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(2**18, 2**18).cuda()\n"
    )
    torch.cuda.reset_peak_memory_stats()
    assert [key.key for key in ckpttool.trace(f"{tmp_path / 'large.py'}:build").serialized] == [
        "weight",
        "bias",
    ]
    assert torch.cuda.max_memory_allocated() < 2**20


# Live models and programs


def test_a_live_model_on_the_gpu_gets_the_weights(tmp_path: Path) -> None:
    for place in (GPU, "cpu"):
        new = Net(1).to(place)
        torch.save(new.state_dict(), tmp_path / "new.pt")
        makes: tuple[Callable[[nn.Module], Any], ...] = (
            lambda net: net,
            torch.compile,
            nn.DataParallel,
        )
        for make in makes:
            live = Net(0).to(GPU)
            addresses = {name: value.data_ptr() for name, value in live.named_parameters()}
            ckpttool.load(str(tmp_path / "new.pt"), make(live))
            assert equal(live.state_dict(), new.state_dict())
            assert addresses == {name: value.data_ptr() for name, value in live.named_parameters()}
        live = Net(0).to(GPU).eval()
        ckpttool.swap_weights(live, new.state_dict())
        assert torch.equal(live(tokens()), new.to(GPU).eval()(tokens()))
        assert live.head.weight is live.embed.weight


@pytest.mark.parametrize("place", [GPU, "cpu"])
def test_an_exported_program_on_the_gpu_gets_new_weights(
    tmp_path: Path, run: Run, place: str
) -> None:
    old, new = Net(0).to(GPU).eval(), Net(1).to(GPU).eval()
    torch.export.save(torch.export.export(old, (tokens(),)), tmp_path / "old.pt2")
    torch.save(Net(1).to(place).state_dict(), tmp_path / "new.pt")
    done = run(
        "swap-weights",
        tmp_path / "old.pt2",
        tmp_path / "new.pt",
        "-o",
        tmp_path / "new.pt2",
        "--verify",
    )
    assert done.status == 0, done.err
    program = torch.export.load(tmp_path / "new.pt2")
    assert torch.equal(program.module()(tokens()), new(tokens()))
    assert {value.device.type for value in program.state_dict.values()} == {GPU}
    loaded = torch.export.load(tmp_path / "old.pt2")
    ckpttool.swap_weights(loaded, new.state_dict())
    assert torch.equal(loaded.module()(tokens()), new(tokens()))


def test_a_compiled_package_of_the_gpu_gets_new_weights(tmp_path: Path, run: Run) -> None:
    config = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    }
    old, new = Net(0).to(GPU).eval(), Net(1).to(GPU).eval()
    program = torch.export.export(old, (tokens(),))
    package = tmp_path / "old.pt2"
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(package), inductor_configs=config
    )
    used = {
        key: value
        for key, value in new.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    torch.save(used, tmp_path / "new.pt")
    model = f"{__file__}:Net"
    done = run(
        "swap-weights",
        package,
        tmp_path / "new.pt",
        "-o",
        tmp_path / "new.pt2",
        "--verify",
        "--model",
        model,
    )
    assert done.status == 0, done.err
    for path, oracle in ((package, old), (tmp_path / "new.pt2", new)):
        outputs = tmp_path / "outputs.pt"
        ended = subprocess.run(
            [sys.executable, "-c", OUTPUTS, path, outputs], check=False
        ).returncode
        if ended < 0 and path == package:
            pytest.skip("torch crashes when it loads its own package")
        assert ended == 0
        assert torch.allclose(torch.load(outputs), oracle(tokens()), atol=1e-5)


OUTPUTS = """
import sys, torch
from torch.export.pt2_archive._package import load_pt2
runner = load_pt2(sys.argv[1], load_weights_from_disk=True).aoti_runners["model"]
torch.save(runner(torch.tensor([0, 5, 3, 1], device="cuda")), sys.argv[2])
"""


@pytest.mark.parametrize("place", [GPU, "cpu"])
def test_a_loaded_package_of_the_gpu_gets_new_weights(tmp_path: Path, place: str) -> None:
    old, new = Net(0).to(GPU).eval(), Net(1).to(GPU).eval()
    program = torch.export.export(old, (tokens(),))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "inside.pt2")
    )
    load = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
    if subprocess.run([sys.executable, "-c", load, package], check=False).returncode < 0:
        pytest.skip("torch crashes when it loads its own package")
    runner = torch._inductor.aoti_load_package(package)
    used = {
        key: value.to(place)
        for key, value in new.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    for model in (Net, program, old):
        ckpttool.swap_weights(runner, used, model=model)
        assert torch.allclose(runner(tokens()), new(tokens()), atol=1e-5)
        ckpttool.swap_weights(
            runner, {key: torch.zeros_like(value) for key, value in used.items()}, model=model
        )
        assert not torch.allclose(runner(tokens()), new(tokens()), atol=1e-5)


# Optimizers

OPTIMIZERS: dict[str, Any] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, device=GPU), capturable=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True, momentum=0.9),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_on_the_gpu_resumes_in_another_order(
    kind: str, tmp_path: Path, run: Run
) -> None:
    make = OPTIMIZERS[kind]
    torch.backends.cuda.matmul.allow_tf32 = False
    old = OldNet().to(GPU)
    optimizer = make(old.parameters())
    train(old, optimizer, 2)
    saved = {"model": old.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "old.pt")
    to_new = ("--model", f"{__file__}:OldNet", "--to-model", f"{__file__}:Net")
    done = run("remap", tmp_path / "old.pt", *to_new, "-o", tmp_path / "new.pt")
    assert done.status == 0, done.err
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    state, before = new["optimizer"]["state"], saved["optimizer"]["state"]
    where = {
        str(v.device) for s in state.values() for v in s.values() if isinstance(v, torch.Tensor)
    }
    assert where == {
        str(v.device) for s in before.values() for v in s.values() if isinstance(v, torch.Tensor)
    }
    resumed, direct = Net().to(GPU), Net().to(GPU)
    for model in (resumed, direct):
        second = make(model.parameters())
        if model is resumed:
            model.load_state_dict(new["model"], strict=True)
            second.load_state_dict(copy.deepcopy(new["optimizer"]))
        else:
            ckpttool.load(str(tmp_path / "new.pt"), model, second)
        again = copy.deepcopy(old)
        other = make(again.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, second, 2)
        train(again, other, 2)
        values = dict(again.named_parameters())
        assert all(
            torch.allclose(value, values[name], rtol=1e-3, atol=1e-5)
            for name, value in model.named_parameters()
        )
    to_names = ("--model", f"{__file__}:Net", "--optimizer-keys", "fqn")
    assert run("remap", tmp_path / "new.pt", *to_names, "-o", tmp_path / "names.pt").status == 0
    to_ids = ("--model", f"{__file__}:Net", "--optimizer-keys", "id")
    assert run("remap", tmp_path / "names.pt", *to_ids, "-o", tmp_path / "ids.pt").status == 0
    assert same(torch.load(tmp_path / "ids.pt", weights_only=True)["optimizer"], new["optimizer"])


# Wrappers and distributed checkpoints


@pytest.fixture
def group(tmp_path: Path) -> Any:
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_wrapped_models_and_sharded_tensors_on_the_gpu(
    group: None, tmp_path: Path, run: Run
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(0)
    plain = Net(1).state_dict()
    ddp = DistributedDataParallel(torch.compile(Net(1).to(GPU)))
    fsdp1 = FullyShardedDataParallel(Net(1).to(GPU), use_orig_params=True)
    for name, model in (("ddp", ddp), ("fsdp1", fsdp1)):
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        options = ("--model", f"{__file__}:Net", "--to", "serialized")
        done = run("remap", tmp_path / f"{name}.pt", *options, "-o", tmp_path / f"{name}-plain.pt")
        assert done.status == 0, done.err
        assert equal(torch.load(tmp_path / f"{name}-plain.pt", weights_only=True), plain)
        live = Net(0).to(GPU)
        ckpttool.load(str(tmp_path / f"{name}.pt"), live)
        assert equal(live.state_dict(), plain)
    fsdp2 = Net(1).to(GPU)
    fully_shard(fsdp2)
    optimizer = torch.optim.AdamW(fsdp2.parameters(), lr=0.01, fused=True)
    train(fsdp2, optimizer, 1)
    model_state, optimizer_state = get_state_dict(fsdp2, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(tmp_path / "dcp")
    )
    done = run("convert", tmp_path / "dcp", "-o", tmp_path / "dcp.pt")
    assert done.status == 0, done.err
    converted = torch.load(tmp_path / "dcp.pt", weights_only=True)
    expected = {
        key: getattr(value, "full_tensor", lambda v=value: v)()
        for key, value in model_state.items()
    }
    assert equal(converted["model"], expected)
    live = Net(0).to(GPU)
    fully_shard(live)
    ckpttool.load(str(tmp_path / "dcp.pt") + "::model", live, definition=Net)
    found = {
        key: getattr(value, "full_tensor", lambda v=value: v)()
        for key, value in live.state_dict().items()
    }
    assert equal(found, expected)
