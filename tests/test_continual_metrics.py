"""The metrics, computed by hand."""

import pytest

from recollect import RecollectError
from recollect.continual.metrics import mean_matrix, metrics, spread, square

MATRIX = square([[90.0], [70.0, 80.0], [75.0, 50.0, 60.0]])


def test_by_hand():
    found = metrics(MATRIX)
    assert found.ra == pytest.approx((75 + 50 + 60) / 3)
    assert found.la == pytest.approx((90 + 80 + 60) / 3)
    assert found.bti == pytest.approx(((75 - 90) + (50 - 80) + 0) / 3)
    assert found.bwt == pytest.approx(((75 - 90) + (50 - 80)) / 2)
    assert found.forgetting == pytest.approx(((90 - 75) + (80 - 50)) / 2)
    assert found.curve == pytest.approx((90, 75, 185 / 3))


def test_forgetting_counts_from_the_best_of_the_tasks_before_the_last():
    found = metrics(square([[50.0], [60.0, 10.0], [40.0, 30.0, 99.0]]))
    assert found.forgetting == pytest.approx(((60 - 40) + (10 - 30)) / 2)
    assert found.bwt == pytest.approx(((40 - 50) + (30 - 10)) / 2)


def test_one_task_has_nothing_to_forget():
    found = metrics([[42.0]])
    assert (found.ra, found.la, found.bti, found.bwt, found.forgetting) == (42, 42, 0, None, None)


def test_a_matrix_is_square_and_none_lies_ahead():
    assert MATRIX == [[90, None, None], [70, 80, None], [75, 50, 60]]
    for wrong in ([], [[1.0, 2.0]], [[None]], [[1.0, None], [None, 2.0]]):
        with pytest.raises(RecollectError, match="accuracy matrix"):
            metrics(wrong)


def test_over_seeds():
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.deviation == pytest.approx(7**0.5)
    assert str(found) == "3.00 ± 2.65"
    assert str(spread([1.0])) == "1.00"
    with pytest.raises(RecollectError, match="a mean of no values"):
        spread([])
    other = square([[80.0], [60.0, 70.0], [65.0, 40.0, 50.0]])
    assert mean_matrix([MATRIX, other]) == [[85, None, None], [65, 75, None], [70, 45, 55]]
