"""Every pair of features, and a seeded random sample of more at a time."""

import cases
import pytest
from compare import check


@pytest.mark.every_isa
@pytest.mark.parametrize("case", cases.PAIRS, ids=str)
def test_pair(paged_attn, device, case):
    check(paged_attn, case, device)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", cases.random_cases(300), ids=str)
def test_random(paged_attn, device, case):
    check(paged_attn, case, device)


def test_pairs_are_complete():
    """A pair is left out only when it cannot be asked, and for one of these reasons."""
    reasons = {
        "K and V share memory: an append would write each slot twice",
        "rotary_dim <= head_dim",
        "an 8-bit q is not rotated",
    }
    left_out = [
        cases.conflict(cases.FEATURES[a], cases.FEATURES[b])
        for a in cases.FEATURES
        for b in cases.FEATURES
        if a < b and cases.conflict(cases.FEATURES[a], cases.FEATURES[b])
    ]
    assert {reason for reason in left_out if not reason.startswith("two values of ")} == reasons
    assert len(cases.PAIRS) > 1200
