"""How many examples Hypothesis draws: a test says how many suffice to trust it, a profile takes its share.

`HYPOTHESIS_PROFILE` names the profile: `ci` (the default, of `make test`) draws a few examples a run,
`thorough` (of `make test-rest`) as many as the test says. Each run has new random seeds.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

FEW = 15
"""As many examples each test has at least, unless it says fewer."""
SHARES = {"ci": 0.1, "thorough": 1.0}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def _number(of: int, profile: str) -> int:
    return max(min(of, FEW), round(of * SHARES[profile]))


for _name in SHARES:
    # Other processes may take the processors at any time, and the first call of a compiled function loads it:
    # how long an example takes is no property of the code.
    settings.register_profile(
        _name,
        max_examples=_number(100, _name),
        derandomize=False,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(PROFILE)


def examples(number: int, *suppressed: HealthCheck, **others: Any) -> settings:
    """Return settings that draw the profile's share of `number` examples.

    :param suppressed: health checks that do not hold for the test, besides that of its time
    :param others: further settings of Hypothesis
    """
    checks = [HealthCheck.too_slow, *suppressed]
    return settings(max_examples=_number(number, PROFILE), suppress_health_check=checks, **others)
