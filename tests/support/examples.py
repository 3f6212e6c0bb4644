"""The number of examples that Hypothesis draws: a test names a sufficient number, a profile takes its share.

`HYPOTHESIS_PROFILE` names the profile: `ci` (the default, of `make test`) draws a tenth, `thorough` (of
`make test-rest`) four tenths, `full` all of them. Each run has new random seeds, so that runs add up. Use
`full` for code that you have changed.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

FEW = 15
"""The least number of examples of each test, unless the test names fewer."""
SHARES = {"ci": 0.1, "thorough": 0.4, "full": 1.0}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def _number(of: int, profile: str) -> int:
    return max(min(of, FEW), round(of * SHARES[profile]))


for _name in SHARES:
    # The duration of an example says nothing about the code: other processes may take the processors, and
    # the first call of a compiled function loads it.
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
