"""The declarations for Airflow's provider manager and connection form, from `provider.yaml`."""

from __future__ import annotations

from pathlib import Path

_ABOUT_RELEASES = ("state", "source-date-epoch", "versions")
"""The keys that Airflow's own providers have in provider.yaml, and leave out of `get_provider_info`."""


def read_provider_info() -> dict[str, object]:
    """Return the declarations of `provider.yaml` that Airflow reads."""
    # PyYAML is a dependency of Airflow alone; its parser in C takes 1 ms, the other one 10 ms.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (Path(__file__).parent / "provider.yaml").read_text(encoding="utf-8")
    declared: dict[str, object] = yaml.load(text, loader)  # noqa: S506 - a safe loader
    return {key: value for key, value in declared.items() if key not in _ABOUT_RELEASES}
