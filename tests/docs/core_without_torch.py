"""Prove that the core of Shardsmith works where torch and the other training extras are missing.

`make core` runs this file in an environment without them; `--blocked` makes them look absent instead,
so that the proof also runs where they are installed. Everything outside `shardsmith.engine` is core.
"""

import importlib
import json
import pkgutil
import sys
from importlib.util import find_spec

from click.testing import CliRunner

EXTRAS = ("torch", "tokenizers", "safetensors", "tensorboard")
SCHEDULE = ("schedule", "one_f_one_b", "--pipeline", "4", "--microbatches", "8", "--json")


def core_modules():
    """Names of all modules outside the engine, found without importing the engine's."""
    import shardsmith

    names = ["shardsmith"]
    folders = [(shardsmith.__path__, "shardsmith.")]
    while folders:
        for module in pkgutil.iter_modules(*folders.pop()):
            if module.name == "shardsmith.engine":
                continue
            names.append(module.name)
            if module.ispkg:
                package = importlib.import_module(module.name)
                folders.append((package.__path__, module.name + "."))
    return sorted(names)


def run(*words, exit_code=0):
    from shardsmith.cli.main import main

    result = CliRunner().invoke(main, words, prog_name="shardsmith")
    assert result.exit_code == exit_code, f"shardsmith {' '.join(words)}: {result.output} {result.exception!r}"
    return result.output


def prove():
    for name in core_modules():
        importlib.import_module(name)
    from shardsmith.cli.main import VERBS

    for verb in VERBS:
        assert f"shardsmith {verb}" in run(verb, "--help")
    assert run("--help")
    assert json.loads(run("explain", "F001", "--json"))["title"] == "unknown code"
    assert abs(json.loads(run(*SCHEDULE))["bubble_of_step"] - 3 / 11) < 1e-9  # (P - 1) / (m + P - 1)
    (refused,) = json.loads(run("verify", "--plan", "tensor=2", "--json", exit_code=1))["errors"]
    assert refused["code"] == "X201", refused
    (refused,) = json.loads(run("dryrun", "--plan", "tensor=2", "--json", exit_code=1))["errors"]
    assert refused["code"] == "X201", refused
    loaded = [name for name in EXTRAS if sys.modules.get(name)]
    assert not loaded, f"the core loaded {loaded}"
    return len(core_modules()), len(VERBS)


if __name__ == "__main__":
    if "--blocked" in sys.argv:
        sys.modules.update(dict.fromkeys(EXTRAS))  # None: importing it fails, and it cannot be found
    else:
        present = [name for name in EXTRAS if find_spec(name)]
        assert not present, f"this environment has {present}: run in one without them, or with --blocked"
    modules, verbs = prove()
    print(f"core without torch: {modules} modules and {verbs} verbs work")
