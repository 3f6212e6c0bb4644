"""Check a commit message: `python setup/commit_message.py FILE`, which a commit-msg hook runs.

The subject has at most 72 characters, begins with an imperative in a capital letter ("Fix …"), and ends
without a period. A blank line separates it from the body. Merge, revert, fixup and squash commits pass.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_CHARACTERS = 72
_MADE_BY_GIT = re.compile(r"(?:Merge|Revert|fixup!|squash!)(?:\s|$)")
_COMMENT = re.compile(r"^#.*\n?", re.MULTILINE)
_OTHER_WORDS = (
    "a all an any as at both by each every everything for from have how if in it its neither never no none"
    " nothing of on one only our so some that the their there these they this those to we what when where"
    " whether which who whose why with"
)
"""First words that are no verb. "Have" begins a causative ("Have tables wait"), which hides the actor."""
_ENDINGS = ("ed", "ing")
_VERBS_WITH_ENDING = frozenset(
    {"bring", "embed", "exceed", "feed", "need", "ping", "proceed", "speed", "string"}
)


def problems(message: str) -> Iterator[str]:
    """Yield the problems of a commit message, as Git passes it to a commit-msg hook."""
    message = _COMMENT.sub("", message.split("\n# ------------------------ >8", 1)[0])
    subject, *rest = message.lstrip("\n").split("\n")
    if _MADE_BY_GIT.match(subject):
        return
    if not subject.strip():
        yield "the subject line is empty"
        return
    if len(subject) > MOST_CHARACTERS:
        yield f"the subject line has {len(subject)} characters; the limit is {MOST_CHARACTERS}"
    if subject.rstrip().endswith("."):
        yield "the subject line ends with a period"
    first = re.split(r"[\s,:;]", subject, maxsplit=1)[0]
    if not first[0].isupper():
        yield "the subject line does not begin with a capital letter"
    if not _is_imperative(first.lower()):
        yield f"the subject line does not begin with an imperative such as Add or Fix, but with {first!r}"
    if rest and rest[0].strip():
        yield "the line after the subject line is not blank"


def _is_imperative(word: str) -> bool:
    """Return False for words that are certainly no imperative: other parts of speech, and "Fixed", "Adds"."""
    if not word.isalpha() or word in _OTHER_WORDS.split():
        return False
    if word.endswith(_ENDINGS) and word not in _VERBS_WITH_ENDING:
        return False
    return not word.endswith("s") or word.endswith(("ss", "us", "as"))


def main(file: str) -> int:
    """Print the problems of the message in a file; return 1 if there are any."""
    found = list(problems(Path(file).read_text(encoding="utf-8")))
    for problem in found:
        sys.stderr.write(f"commit message: {problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
