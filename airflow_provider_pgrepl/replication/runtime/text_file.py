"""Text files that people name in arguments: pipeline files, migrations."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_pgrepl.errors import ConfigError


def read_text(what: str, path: str | Path) -> str:
    """The text of a UTF-8 file, without the byte order mark of some editors. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        why = error.strerror or error.__class__.__name__
        hint = (
            ""
            if Path(path).is_absolute()
            else f"the path begins in {Path.cwd()}: go to its folder, or give it whole"
        )
        raise ConfigError(f"cannot read the {what} {path}: {why}", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the {what} {path}: it is not UTF-8 text") from None
