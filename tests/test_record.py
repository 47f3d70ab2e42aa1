"""How the scripts of experiments/ write their results, and that results/ is written so."""

import json
from pathlib import Path

import pytest
import record

from recollect.continual.metrics import metrics, square
from recollect.files import compact

RESULTS = Path(__file__).parent.parent / "results"


def test_what_holds_nothing_else_is_one_line(tmp_path):
    value = {"command": 'a "b"', "config": {"lr": 1e-09, "window": None}, "rows": [[1.25, 2], [True, 1 / 3]], "empty": []}
    path = tmp_path / "deeper" / "found.json"
    record.write(path, value)
    assert path.read_text().splitlines() == [
        "{",
        ' "command": "a \\"b\\"",',
        ' "config": {"lr": 1e-09, "window": null},',
        ' "rows": [',
        "  [1.25,2],",
        "  [true,0.333333]",
        " ],",
        ' "empty": []',
        "}",
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_results_are_written_so(path):
    assert compact(json.loads(path.read_text())) + "\n" == path.read_text()


def test_a_learner_s_row():
    forgets, constant = square([[90.0], [70.0, 80.0]]), square([[50.0], [50.0, 70.0]])
    runs = [{"matrix": forgets, "on": "test", "seconds": 1.0}, {"matrix": constant, "on": "test", "seconds": 2.0}]
    runs[1] |= {"device": "cpu", "environment": {"processor": "AMD EPYC", "cuda": None}}
    row = record.learner_row(runs)
    assert row["matrices"] == [[[90.0], [70.0, 80.0]], [[50.0, 70.0]]]
    assert row["bti"]["mean"] == (metrics(forgets).bti + metrics(constant).bti) / 2 == -5
    assert (row["ra"]["mean"], row["ra"]["n"], row["seconds"], row["where"]) == (67.5, 2, [1.0, 2.0], ["AMD EPYC"])
    assert record.learner_row([{"matrix": [[90.0]], "on": "test", "seconds": 1.0}])["bwt"] is None
