"""The main job from end to end: new weights for a program in production, without exporting again.

`make demo` runs it in `build/demo` (``demo.py FOLDER``: elsewhere) and leaves its files there to
play with. It exits non-zero unless the program with the swapped weights gives the outputs of the
newly trained model, bit for bit.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import fusion_decoder as example

MODEL = "fusion_decoder.py:build"


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def ckpttool(arguments: str, status: int) -> None:
    """Shows and runs one command; ends the demo where it does not exit with `status`."""
    print(f"\n$ ckpttool {arguments}", flush=True)
    command = [str(Path(sys.executable).with_name("ckpttool")), *shlex.split(arguments)]
    found = subprocess.run(command, check=False).returncode
    if found != status:
        sys.exit(f"FAILED: exit status {found}, expected {status}")


def load_naively(weights: dict[str, torch.Tensor]) -> None:
    """Loads the state dict that the model saved into the exported program, and shows torch's
    answer, shortened.
    """
    program = torch.export.load("deployed.pt2").module()
    print("\n>>> program.load_state_dict(checkpoint['model'])")
    try:
        program.load_state_dict(weights)
    except RuntimeError as error:
        for line in str(error).splitlines():
            names = line.split(", ")
            more = f", … and {len(names) - 2} more" if len(names) > 2 else ""
            print(", ".join(names[:2]).expandtabs(4) + more, flush=True)
    else:
        sys.exit("FAILED: torch loaded the state dict, so there is nothing to show")


def outputs(program: str) -> torch.Tensor:
    """Logits of an exported program for inputs that it was neither exported nor trained with."""
    with torch.no_grad():
        return torch.export.load(program).module()(*example.example_inputs(seed=7))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    # from an earlier run: ckpttool overwrites nothing unasked
    Path("swapped.pt2").unlink(missing_ok=True)
    shutil.copy(example.__file__, ".")

    say("Train for 20 steps, export, and put the program into production.")
    model = example.build()
    optimizer = example.optimizer(model)
    print(f"loss {example.train(model, optimizer, range(20)):.3f}, saved deployed.pt2")
    torch.export.save(torch.export.export(model, example.example_inputs()), "deployed.pt2")

    say("Train for 60 steps more, and save a checkpoint.")
    print(f"loss {example.train(model, optimizer, range(20, 80)):.3f}, saved train.pt")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 80}, "train.pt"
    )

    say("The program should get the new weights. But their names do not fit:")
    load_naively(torch.load("train.pt")["model"])

    say("Why? Ask the model what it calls its tensors, and what it saves.")
    ckpttool(f"diff --model {MODEL}", status=1)

    say("So this is how the two files differ.")
    ckpttool("diff train.pt::model deployed.pt2", status=1)

    say("Put the new weights into the program, under the names that it knows.")
    ckpttool(f"swap-weights deployed.pt2 train.pt -o swapped.pt2 --model {MODEL}", status=0)

    say("Is the program with the swapped weights the newly trained model?")
    with torch.no_grad():
        expected = model(*example.example_inputs(seed=7))
    if torch.equal(outputs("deployed.pt2"), expected):
        sys.exit("FAILED: training changed nothing, so this proves nothing")
    if not torch.equal(outputs("swapped.pt2"), expected):
        sys.exit(
            "FAILED: the swapped program's outputs differ from those of the newly trained model"
        )
    print(f"PASSED: all {expected.numel()} logits are equal, bit for bit.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo"))
