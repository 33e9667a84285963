"""A CSV of measured runs: missing columns are named, and the guide's table is that of the code."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main
from shardsmith.design.validation.columns import NEEDED, OPTIONAL, require_columns
from shardsmith.errors import Refused

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "src" / "shardsmith" / "design" / "cost" / "data" / "runs.csv"


def said(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["validate", *map(str, words)])
    return done.exit_code, done.output


def test_missing_columns_are_named_with_what_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    code, text = said(tmp_path / "runs.csv")
    assert code == 1
    assert "error[F702]: needed columns are missing: id, framework, layers" in text
    assert "nan" not in text
    header, row = RUNS.read_text().splitlines()[:2]
    (tmp_path / "runs.csv").write_text(header.replace("iter_time_best_s", "iter_time_s") + "\n" + row + "\n")
    with pytest.raises(Refused) as refused:
        require_columns(tmp_path / "runs.csv")
    assert refused.value.faults[0].hint == "iter_time_s may be iter_time_best_s"


def test_an_empty_file_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    for content, code in ((b"", "F702"), (b"\xff\xfe\x00\n", "F703")):
        (tmp_path / "runs.csv").write_bytes(content)
        with pytest.raises(Refused) as refused:
            require_columns(tmp_path / "runs.csv")
        assert [fault.code for fault in refused.value.faults] == [code]


def test_skipped_rows_come_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("\n".join(RUNS.read_text().splitlines()[:3]) + "\n")
    code, text = said(tmp_path / "runs.csv", "--moe")
    assert code == 1
    assert "no row can be scored" in text
    assert "skipped 2: dense: scored apart (" in text
    assert said(tmp_path / "runs.csv")[0] == 0


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("hidden", "1e300", "hidden = 1e+300 is not from 0 to 1e+15"),
        ("hidden", "inf", "hidden = inf is not from 0 to 1e+15"),
        ("tp", "1e-300", "tp = 1e-300 is below 1"),
        ("iter_time_best_s", "1e300", "iter_time_best_s = 1e+300 is not from 0 to 1e+15"),
        ("iter_time_best_s", "1e-300", "measured step time = 1e-300: not from 1e-06 to 1e+07"),
        ("peak_mem_gb", "1e300", "peak_mem_gb = 1e+300 is not from 0 to 1e+15"),
    ],
)
def test_sizes_that_nothing_has_are_skipped_and_json_stays_json(
    tmp_path: Path, column: str, value: str, reason: str
) -> None:
    with RUNS.open(newline="") as file:
        rows = list(csv.DictReader(file))[:2]
    rows[0][column] = value
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    code, text = said(tmp_path / "runs.csv", "--json")
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (code, len(data["rows"])) == (0, 1)
    assert data["skipped"] == [{"id": rows[0]["id"], "reason": reason}]


def test_every_column_is_explained_in_the_guide_and_known() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").partition("## Validate")[2]
    for names, meaning in (NEEDED | OPTIONAL).items():
        assert f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {meaning} |" in guide
    known = {name for names in NEEDED | OPTIONAL for name in names.split(", ")}
    assert known == set(RUNS.read_text().splitlines()[0].split(","))
