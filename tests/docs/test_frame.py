"""The frame of the project: contracts that bite, a core without torch, public names, quick help, clean text."""

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from seconds import seconds_of

import shardsmith
from shardsmith import api
from shardsmith.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardsmith"
BIN = Path(sys.executable).parent


def sh(*words, cwd=ROOT, timeout=120):
    return subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def test_every_module_imports():
    names = [m.name for m in pkgutil.walk_packages(shardsmith.__path__, "shardsmith.")]
    assert "shardsmith.engine.runtime" in names
    for name in names:
        importlib.import_module(name)


def test_h11_core_and_every_help_work_without_torch():
    done = sh(sys.executable, ROOT / "tests" / "docs" / "core_without_torch.py", "--blocked")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("core without torch:")


def test_the_proof_without_torch_can_fail():
    refused = sh(sys.executable, ROOT / "tests" / "docs" / "core_without_torch.py")
    assert refused.returncode == 1
    assert "'torch'" in refused.stderr


@pytest.mark.parametrize("verb", ["", *sorted(VERBS)])
def test_help_takes_under_two_seconds(verb):
    done, seconds = seconds_of([BIN / "shardsmith", *([verb] if verb else []), "--help"], 2)
    assert done.returncode == 0, done.stderr
    assert seconds < 2


def test_a_file_for_every_verb_and_a_verb_for_every_file():
    files = {p.stem for p in (PACKAGE / "cli").glob("*.py") if "\ndef command(" in p.read_text()}
    assert files == set(VERBS)


def test_public_names_are_those_that_the_guide_lists():
    guide = (ROOT / "docs" / "guide.md").read_text()
    listed = re.findall(r"^\| `(\w+)", guide.partition("## From Python")[2], flags=re.MULTILINE)
    assert sorted(listed) == sorted(shardsmith.__all__)


def test_every_function_of_the_api_is_public():
    functions = {name for name, f in inspect.getmembers(api, inspect.isfunction) if f.__module__ == api.__name__}
    verbs = {name for name in functions if not name.startswith("_")}
    assert verbs <= set(shardsmith.__all__)
    assert all(getattr(shardsmith, name) is getattr(api, name) for name in verbs)


def test_no_public_name_hides_a_module():
    modules = {m.name for m in pkgutil.iter_modules(shardsmith.__path__)}
    assert not modules & set(shardsmith.__all__)


def test_every_code_in_the_source_can_be_explained():
    named = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r'code="([A-Z]\d+)"', path.read_text())}
    asked = f"from shardsmith import api\nfor code in {sorted(named)}:\n    assert api.explain(code).because, code"
    done = sh(sys.executable, "-c", asked)
    assert done.returncode == 0, done.stderr


def broken(contracts_output):
    return set(re.findall(r"^(.+?) BROKEN", contracts_output, flags=re.MULTILINE))


PLANTED = {
    "layout/__init__.py": ("import shardsmith.engine", "floors: thinking and doing never meet below the roof"),
    "plan/plan.py": ("import torch", "only the engine reaches torch and the training extras"),
    "api.py": ("import torch", "the roof reaches torch only through the engine"),
    "schedule/orders/gpipe.py": (
        "import shardsmith.schedule.orders.interleaved",
        "schedules do not know each other",
    ),
    "engine/parallel/data.py": (
        "import shardsmith.engine.parallel.tensor",
        "axes of the engine do not know each other",
    ),
    "engine/runtime/__init__.py": ("import shardsmith.engine.train", "floors of the doing wing"),
    "cli/explain.py": ("import shardsmith.cli.prepare", "verbs of the command line do not know each other"),
}


def test_planted_imports_break_their_contracts(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "shardsmith", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    clean = sh(BIN / "lint-imports", "--no-cache", cwd=tmp_path)
    assert broken(clean.stdout) == set(), clean.stdout
    for name, (line, _) in PLANTED.items():
        path = tmp_path / "shardsmith" / name
        path.write_text(path.read_text() + f"\n{line}\n")
    planted = sh(BIN / "lint-imports", "--no-cache", cwd=tmp_path)
    assert planted.returncode == 1
    assert broken(planted.stdout) >= {contract for _, contract in PLANTED.values()}


def test_only_the_engine_names_torch_in_an_import():
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "engine" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.partition(".")[0] == "torch" for n in names), f"{path.name}:{node.lineno}"


# Written in halves, so that this file passes its own test.
FOREIGN = ("/wo" + "rk/", "/tmp/" + "bash", "/ro" + "ot/", "/opt/" + "pypi", "pythonhosted" + ".org", "sub" + "agent")


def text_files():
    for top in ("src", "tests", "docs", "benchmarks", ".ci", ".github"):
        yield from (p for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    yield from (
        p for p in ROOT.glob("*") if p.suffix in {".md", ".toml", ".txt"} or p.name in {"Makefile", ".importlinter"}
    )


def test_no_file_speaks_of_the_machine_it_was_written_on():
    found = []
    for path in text_files():
        if path.suffix in {".png", ".bin", ".idx", ".pdf"}:
            continue
        text = path.read_text(encoding="utf-8").lower()
        found += [f"{path.relative_to(ROOT)}: {word}" for word in FOREIGN if word in text]
    assert not found


def test_the_licence_is_the_whole_apache_licence():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert all(f"   {n}. " in text for n in range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text
