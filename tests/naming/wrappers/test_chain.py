"""Wrapper chains: recognized from the keys of real wrappers, and written so that real wrappers load
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import wrapped_definitions
from ckpttool import CkptError, Refused
from ckpttool.naming.match import align
from ckpttool.naming.wrappers import (
    Chain,
    canonical_keys,
    counters,
    declared,
    infer,
    new_counter,
    parse,
    recognize,
    rewrap,
    segments,
    strip,
    stripped_paths,
)
from ckpttool.tracing.instances import listed, runtime_tensors
from command import main
from places import DATA
from wrapped_ranks import Net, net


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def regional() -> nn.Module:
    model = plain()
    model[1] = compiled(model[1])
    return model


def one_block() -> nn.Module:
    model = plain()
    model[1][0] = checkpoint_wrapper(compiled(model[1][0]))
    return model


WRAPPED = {
    "compile": lambda: compiled(plain()),
    "ac": lambda: checkpoint_wrapper(plain()),
    "dp": lambda: nn.DataParallel(plain()),
    "dp(compile)": lambda: nn.DataParallel(compiled(plain())),
    "compile(dp)": lambda: compiled(nn.DataParallel(plain())),
    "ac(compile)": lambda: checkpoint_wrapper(compiled(plain())),
    "compile(ac)": lambda: compiled(checkpoint_wrapper(plain())),
    "averaged": lambda: AveragedModel(plain()),
    "regional compile": regional,
    "one block": one_block,
}


def parameters(model: nn.Module) -> list[str]:
    """Return names by module path; `named_parameters` of the checkpoint wrapper hides its
    segment.
    """
    return [name for name, _ in nn.Module.named_parameters(model)]


@pytest.mark.parametrize("form", WRAPPED)
def test_names_of_a_wrapped_model_match_the_plain_model(form: str) -> None:
    names, plain_names = parameters(WRAPPED[form]()), parameters(plain())
    assert names != plain_names
    assert list(canonical_keys(names).values()) == plain_names
    assert align(plain_names, names) == dict(zip(plain_names, names))
    assert align(names, plain_names) == dict(zip(names, plain_names))


def test_the_counter_of_an_averaged_model_is_recognized_next_to_its_module() -> None:
    assert counters(["n_averaged", "module.w", "a.n_averaged", "b.n_averaged", "b.module.w"]) == [
        "n_averaged",
        "b.n_averaged",
    ]
    assert counters(["bias", "module.w", "step"]) == []
    names = canonical_keys(AveragedModel(plain()).state_dict())
    assert list(names.values()) == ["n_averaged", *plain().state_dict()]


@pytest.mark.parametrize("form", ["compile", "dp", "dp(compile)", "compile(dp)"])
def test_the_prefix_of_a_chain_matches_real_wrappers(form: str) -> None:
    expected = [parse(form).prefix + key for key in plain().state_dict()]
    assert list(WRAPPED[form]().state_dict()) == expected


@pytest.mark.parametrize(
    "keys",
    [
        ["module.weight", "head.weight"],  # a user's `module` next to another module
        ["encoder.module.weight"],  # the only module, but not at the root
        ["block._orig_mod.weight", "block.bias"],  # wrappers do not have tensors
        ["layer.weight"],
        ["model.layers.0.weight", "model.embed.weight"],  # a causal LM with a tied head
        ["base_model.weight", "head.weight"],
        ["base_model.model.weight", "base_model.value"],
        ["a.base_layer.weight", "a.scale"],  # not a PEFT adapter
        ["n_averaged", "module.weight", "head.weight"],
    ],
)
def test_a_users_own_module_is_not_a_wrapper(keys: list[str]) -> None:
    assert recognize(keys) == frozenset()


def test_segments_are_listed_from_the_outside_in() -> None:
    assert segments(recognize(["module._orig_mod.a.weight", "module._orig_mod.b.weight"])) == [
        "module",
        "_orig_mod",
    ]


@pytest.mark.parametrize(
    "form", ["", "ddp(", "ddp(compile", "nonsense", "ddp(nonsense)", "compile)"]
)
def test_an_unknown_form_is_an_error(form: str) -> None:
    with pytest.raises(CkptError, match="no such form"):
        parse(form)


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        (["a.w", "b.w"], None),
        (["module.a.w", "module.b.w"], "ddp"),
        (["_orig_mod.module.a.w", "_orig_mod.module.b.w"], "compile(ddp)"),
        (["n_averaged", "module.a.w", "module.b.w"], "averaged"),
        (["module.n_averaged", "module.module.a.w", "module.module.b.w"], "ddp(averaged)"),
        (["a._orig_mod.w", "b.w"], "wrapped"),
        (["module.a._orig_mod.w", "module.b.w"], "ddp(wrapped)"),
        (
            [
                "base_model.model.a.w",
                "base_model.model.b.base_layer.w",
                "base_model.model.b.lora_A.w",
            ],
            "peft",
        ),
        (["model.a.w", "model.b.w"], None),
    ],
)
def test_the_form_is_inferred(keys: list[str], form: str | None) -> None:
    assert infer(keys).form == form


def test_declared_wrappers_are_removed() -> None:
    # `module` is a wrapper, or the only attribute of the user's model
    keys = ["module.a.w", "module.b._orig_mod.w"]
    assert declared(parse("ddp"), keys).paths == {"module", "module.b._orig_mod"}
    assert infer(["module.a.w", "module.b.w"]).paths == {"module"}
    with pytest.raises(Refused, match="1 of 3 keys do not begin with module"):
        declared(parse("ddp"), [*keys, "head.w"])
    # the counter has no prefix
    assert declared(parse("averaged"), ["n_averaged", "module.a"]).root == ("module",)
    with pytest.raises(Refused) as refused:
        declared(parse("averaged"), ["n_averaged", "module.a", "b"])
    assert [problem.key for problem in refused.value.problems] == ["b"]


@pytest.mark.parametrize(
    ("source_form", "key"), [("serialized", "_orig_mod.module.w"), ("ddp", "_orig_mod.w")]
)
def test_from_declares_the_wrappers_of_a_remap(source_form: str, key: str, tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(1)}, tmp_path / "model.pt")
    options = ["--from", source_form, "--to", "compile", "-o", str(tmp_path / "out.pt")]
    assert main(["remap", str(tmp_path / "model.pt"), *options]) == 0
    assert list(torch.load(tmp_path / "out.pt")) == [key]


NAMES = st.lists(
    st.sampled_from(["a", "0", "layer", "module", "_orig_mod", "model", "base_layer"]), max_size=4
)
CHAINS = st.lists(
    st.sampled_from(["ddp", "compile", "ac", "fsdp", "fully_shard", "averaged", "fpw"]), max_size=4
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(NAMES, min_size=1, max_size=6),
    CHAINS.filter(lambda wrappers: wrappers.count("averaged") < 2),
)
def test_an_added_chain_can_be_removed(names: list[list[str]], wrappers: list[str]) -> None:
    keys = list(dict.fromkeys(".".join([*name, "w"]) for name in names))
    assume(not infer(keys).paths)  # keys cannot show if a name that looks wrapped is wrapped
    chain = Chain(tuple(wrappers))
    wrapped, _ = rewrap({key: key for key in keys}, chain)
    keys_in_chain = [*new_counter(chain, ()), *wrapped.values()]
    assert [name for name in canonical_keys(keys_in_chain).values() if name != "n_averaged"] == keys
    assert rewrap(canonical_keys(keys_in_chain), Chain(()), counters(keys_in_chain)) == (
        dict(zip(wrapped.values(), keys)),
        counters(keys_in_chain),
    )


# AveragedModel's counter


@pytest.mark.parametrize(
    ("to", "key"), [("averaged", "n_averaged"), ("ddp(averaged)", "module.n_averaged")]
)
@pytest.mark.parametrize("options", [(), ("--model", "wrapped_ranks:Net")])
def test_the_counter_of_an_averaged_model_is_kept(
    options: tuple[str, ...], to: str, key: str, tmp_path: Path
) -> None:
    averaged = AveragedModel(net(0))
    averaged.update_parameters(net(1))
    averaged.update_parameters(net(2))
    torch.save(averaged.state_dict(), tmp_path / "ema.pt")
    assert (
        main(
            [
                "remap",
                str(tmp_path / "ema.pt"),
                *options,
                "--to",
                to,
                "-o",
                str(tmp_path / "out.pt"),
            ]
        )
        == 0
    )
    result = torch.load(tmp_path / "out.pt")
    assert result[key] == 2
    assert sorted(result) == sorted(
        [key, *(parse(to).prefix + name for name in Net().state_dict())]
    )
    restored = [
        "remap",
        str(tmp_path / "out.pt"),
        *options,
        "--to",
        "serialized",
        "-o",
        str(tmp_path / "back.pt"),
    ]
    assert main(restored) == 0
    Net().load_state_dict(torch.load(tmp_path / "back.pt"))


# PEFT


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    )
    return get_peft_model(model, LoraConfig(target_modules=["1.0", "1.1"], modules_to_save=["2"]))


ADAPTED = [
    "1.0.lora_A.default.weight",
    "1.0.lora_B.default.weight",
    "2.modules_to_save.default.bias",
]


@pytest.mark.parametrize(
    "wrapper", [lambda m: m, compiled, nn.DataParallel], ids=["plain", "compile", "dp"]
)
def test_names_in_a_peft_model_match_the_base_model(
    wrapper: Callable[[nn.Module], nn.Module],
) -> None:
    base = [f"{name}.{leaf}" for name in ("0", "1.0", "1.1", "2") for leaf in ("weight", "bias")]
    model = wrapper(adapted())
    result = canonical_keys(model.state_dict())
    live = {tensor.canonical for tensor in runtime_tensors(model, listed(model))}
    assert set(result.values()) == live
    assert live >= {*base, *ADAPTED}
    assert all("modules_to_save" in name or "lora_" in name for name in live - set(base))


def test_a_layer_that_peft_changed_in_place_is_recognized() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = inject_adapter_in_model(
        LoraConfig(target_modules=["0"]), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    )
    names = canonical_keys(model.state_dict()).values()
    assert set(names) >= {"0.weight", "0.bias", "0.lora_A.default.weight", "1.weight"}


def test_peft_wrappers_can_be_removed_and_restored(tmp_path: Path) -> None:
    model = adapted()
    torch.save(model.state_dict(), tmp_path / "peft.pt")
    assert (
        main(
            [
                "remap",
                str(tmp_path / "peft.pt"),
                "--to",
                "serialized",
                "-o",
                str(tmp_path / "plain.pt"),
            ]
        )
        == 0
    )
    assert "1.0.weight" in torch.load(tmp_path / "plain.pt")
    options = ["--like", str(tmp_path / "peft.pt"), "-o", str(tmp_path / "back.pt")]
    assert main(["remap", str(tmp_path / "plain.pt"), *options]) == 0
    model.load_state_dict(torch.load(tmp_path / "back.pt"))
    assert (tmp_path / "back.pt").read_bytes() != b""
    keys = ("0.weight", "1.weight", "1.lora_A.weight", "2.weight", "2.lora_embedding_A")
    names, _ = rewrap(dict(zip(keys, keys)), Chain(("peft",)))
    layers = (
        "0.weight",
        "1.base_layer.weight",
        "1.lora_A.weight",
        "2.base_layer.weight",
        "2.lora_embedding_A",
    )
    assert list(names.values()) == [f"base_model.model.{name}" for name in layers]


def test_to_peft_is_refused_without_adapters() -> None:
    with pytest.raises(Refused, match="no layer in the file has an adapter") as refused:
        rewrap({"0.weight": "0.weight"}, parse("peft"))
    assert "--like" in refused.value.hint


# Lightning: saved by pytorch_lightning 2.6.6 after one step; attribute `net` of the module is
# `wrapped_ranks.Net`

LIGHTNING = str(DATA / "lightning-2.6.6.ckpt")


@pytest.mark.parametrize("options", [(), ("--model", "wrapped_ranks:Net")])
def test_the_prefix_of_a_lightning_checkpoint_is_removed(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    assert (
        main(["remap", LIGHTNING, *options, "--to", "serialized", "-o", str(tmp_path / "out.ckpt")])
        == 0
    )
    result, source = torch.load(tmp_path / "out.ckpt"), torch.load(LIGHTNING)
    Net().load_state_dict(result["state_dict"])
    assert result["pytorch-lightning_version"] == source["pytorch-lightning_version"]


def test_to_lightning_adds_the_prefix_model(tmp_path: Path) -> None:
    assert (
        main(["remap", LIGHTNING, "--to", "lightning(compile)", "-o", str(tmp_path / "out.ckpt")])
        == 0
    )
    holder = nn.Module()
    holder.model = compiled(Net())
    holder.load_state_dict(torch.load(tmp_path / "out.ckpt")["state_dict"])


def test_a_common_prefix_is_a_wrapper_only_in_lightning_checkpoints() -> None:
    keys = list(torch.load(LIGHTNING)["state_dict"])
    assert infer(keys).form is None
    assert infer(keys, lightning=True).form == "lightning"


# Wrapped model definitions


DEFINITIONS = ("plain", "compiled", "data_parallel", "checkpointed", "blocks")


@pytest.mark.parametrize(
    ("option", "saved", "loads"),
    [
        *itertools.product(["--model"], DEFINITIONS, DEFINITIONS),
        *(("--to-model", *pair) for pair in itertools.pairwise([*DEFINITIONS, "plain"])),
        *itertools.product(["--model", "--to-model"], *[["hooked", "hooked_and_wrapped"]] * 2),
    ],
)
def test_a_checkpoint_can_be_remapped_to_any_other_definition_of_the_model(
    option: str, saved: str, loads: str, tmp_path: Path
) -> None:
    source, target_model = (f"wrapped_definitions:{name}" for name in (saved, loads))
    models = (
        ("--model", target_model)
        if option == "--model"
        else ("--model", source, "--to-model", target_model)
    )
    model = getattr(wrapped_definitions, saved)()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    options = [*models, "--to", "serialized", "-o", str(tmp_path / "out.pt")]
    assert main(["remap", str(tmp_path / "model.pt"), *options]) == 0
    target = getattr(wrapped_definitions, loads)()
    target.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert all(
        torch.equal(a, b) for a, b in zip(target.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("saved", DEFINITIONS)
def test_a_chain_replaces_the_wrappers_of_a_wrapped_model(saved: str, tmp_path: Path) -> None:
    torch.save(getattr(wrapped_definitions, saved)().state_dict(), tmp_path / "model.pt")
    options = [
        "--model",
        f"wrapped_definitions:{saved}",
        "--to",
        "dp(compile)",
        "-o",
        str(tmp_path / "out.pt"),
    ]
    assert main(["remap", str(tmp_path / "model.pt"), *options]) == 0
    assert sorted(torch.load(tmp_path / "out.pt")) == sorted(
        f"module._orig_mod.{key}" for key in Net().state_dict()
    )


def test_a_key_that_is_only_a_wrapper_segment_keeps_its_name() -> None:
    assert canonical_keys(["module"]) == {"module": "module"}


def test_strip_removes_only_segments_at_the_paths() -> None:
    paths = {"module", "module.a._orig_mod"}
    assert strip("module.a._orig_mod.weight", paths) == "a.weight"
    assert strip("module.b._orig_mod.weight", paths) == "b._orig_mod.weight"
    assert strip("weight", paths) == "weight"
    assert strip("a.module", ()) == "a.module"


def test_stripped_paths_are_inferred_from_pairs() -> None:
    """Of two equal segments, the first belongs to the wrapper."""
    pairs = [
        ("module.module.w", "module.w"),
        ("module._fsdp_wrapped_module.a._orig_mod.w", "a.w"),
        ("b", "b"),
    ]
    paths = stripped_paths(pairs)
    assert [strip(fqn, paths) for fqn, _ in pairs] == [canonical for _, canonical in pairs]
    assert strip("module.a._orig_mod.w", paths) == "a.w"  # FSDP1 hides its segment in keys
    assert strip("module.module.w", paths) == "module.w"
    assert strip("c._orig_mod.w", paths) == "c._orig_mod.w"
