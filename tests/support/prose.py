"""Rules for docstrings, comments, messages, documents and names, which tests/unit/test_prose.py applies.

The rules find symptoms: rewrite the sentence from the code, do not swap single words. `# prose: ignore` on a
line of Python, or `<!-- prose: ignore -->` on a line of Markdown, skips it; `prose: ignore-file` in the first
2,000 characters skips the file, as it does for this one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_SENTENCE_WORDS = 40
MAX_PARAGRAPH_LINES = 6
_FOLDERS = ("airflow_provider_pgrepl", "benchmarks", "dags", "demo", "docs", "setup", "spark_apps", "tests")


def _words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A noun clause as a docstring says what a value means, and leaves out what the function does.
QUESTION_WORDS = _words_of("what whether that where how who whose if which why whatever whoever when")
# "Of the application …", "Those of …", "Have it on the disk": a fragment without a head, or a causative.
HEADLESS_WORDS = _words_of("of those likewise by as have")
PRONOUNS = _words_of("it its they them what who whose which whoever")

PRIVATE_WORDS: tuple[tuple[str, str], ...] = (
    (r"anew", "again; recreate, reopen, replan, resnapshot"),
    (r"mend(?:s|ed|ing)?", "fix, correct"),
    (r"let(?:s|ting)? go", "release, expire, delete"),
    (r"br(?:ing|ings|inging|ought) forward", "catch up, apply the missing changes"),
    (r"pass(?:es|ed|ing)? over", "skip, ignore"),
    (r"as good as", "say that it is not an error"),
    (r"in the way(?! (?:of|in|that|which|to)\b)", "blocks; name the blocking session"),
    (r"(?:see|sees|seen) to(?! (?:be|have)\b)", "handle, maintain; check that"),
    (r"seen to (?:be|have)", "verified, found to be"),
    (r"somebody(?: else)?(?:'s)?|nobody(?:'s)?|whoever", "name the process, session, role or reader"),
    (r"(?<!-)(?<!long )standings?", "publication status, position"),
    (r"told", "confirmed, reported, configured; 'told apart': distinguished"),
    (r"(?:gone|went) back", "reverted to an earlier version"),
    (r"put back", "restored from a copy"),
    (r"set back", "restored to an earlier state, rewound"),
    (r"(?:of|kind of) ours", "this package's, created by this pipeline"),
    (r"(?:one|same|past|that|this|any|some|the|each|which|earlier|later|what|two) moments?(?<!at the moment)",
     "point in time"),
    (r"(?:as of|at) a(?:n earlier)? moment", "as of a point in time"),
    (r"beside", "next to; in addition to; concurrently with"),
    (r"unsent", "not sent (an unchanged TOAST value)"),
    (r"stranger", "another writer"),
    (r"swallow(?:s|ed|ing)?", "drops, discards"),
    (r"amid", "in the middle of"),
    (r"(?:laid|lay|lays|laying) over", "applied on top of"),
    (r"(?<!for )so many(?! that\b)", "name the limit or the number"),
    (r"troubles?", "error, failure"),
    (r"(?:take|takes|taken|took|taking) away", "remove, delete, drop"),
    (r"(?:write|writes|written|wrote|writing) down", "record, store"),
    (r"just now", "temporarily, currently"),
    (r"ways? out", "remedy, how to recover"),
    (r"(?:for|by|of|from|with|and|or|as|than) who(?! (?:is|are)\?)", "name the caller, user or process"),
    (r"hears?(?: of)?|heard(?: of)?", "receives, is notified of"),
    (r"lossless or loud", "state the guarantee: stored exactly, or the table stops with an error"),
    (r"forsaken|unfit", "orphaned; incompatible"),
    (
        r"(?:the|a|each|one|other|which|this|that|no|its|these|those) rooms?(?! (?:for|left|to|in)\b)",
        "package, layer",
    ),
    (r"last words?", "last log line, final error message"),
)  # fmt: skip
_PRIVATE = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), advice) for pattern, advice in PRIVATE_WORDS]
_SENTENCE_WHO = re.compile(r"(?:^|[.;:] )Who (?!\w+\?)[a-z]+ [^?]*?(?:\.|$)")
_ANY_PRIVATE = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern, _ in PRIVATE_WORDS), re.IGNORECASE)
_BRITISH = re.compile(
    r"\b(?:(?:behavi|col|hon|neighb|fav)our\w*|whilst|licence\w*|catalogue\w*"
    r"|(?:recogn|serial|initial|normal|organ|summar|optim|synchron|author)is(?:e[sd]?|ing|ation))\b",
    re.IGNORECASE,
)

PRIVATE_TOKENS = _words_of(
    "anew told untold unsaid mend mended unsent forsaken unfit standing standings bury stranger"
)
TEST_START = re.compile(
    r"test_(?:what|that|whether|who|whose|where|how|which|so|of|those|such|likewise|whatever|whoever)_"
)

PUBLIC_PACKAGES = _words_of("operators sensors hooks triggers notifications")
# Methods that Airflow's base classes document.
INHERITED = _words_of(
    "execute execute_complete poke serialize run on_kill get_conn get_uri submit_job get_job_status"
    " is_job_active is_job_succeeded poll_until_complete get_job_result pre_execute post_execute get_link"
    " notify get_ui_field_behaviour get_connection_form_widgets test_connection cleanup async_notify"
)
VERBS = _words_of(
    "is are was were be been has have had does do did can cannot could must may might will would should"
    " needs need lacks lack holds hold holds fails fail failed names name says say belongs exists exist"
    " begins ends stops refuses takes gives sets contains contain matches match differs differ requires"
    " require expects expect allows allow uses use reads read writes write runs run means mean sends send"
    " knows know stands makes wants cannot isn't doesn't begin end vanished gone list lists publishes"
    " serves carry carries apply applies missing unknown unrecognized invalid empty answers came come"
    " leaves loses asks shows got put logs ran sent keeps keep gave give met tell tells lies lie gets get"
    " fits fit goes went became becomes follows follow"
)
_CASE_CHANGE = re.compile(r"(?<=[a-z])(?=[A-Z])")
# A comment has its own line, or two spaces before it (PEP 8).
_COMMENT = re.compile(r"(?:^\s*|  )#.*$")
# Lists, literal blocks, field lists, tables and diagrams in a docstring.
_LAYOUT = re.compile(r"::\s*$|^\s*(?:[-*|>:]|\d+\.|@|\{)|^ {4,}\S|^\w+ {2,}\S|[├└│─►]", re.MULTILINE)
_TYPE_NAME = re.compile(r"time zone$|varying$")
_SQL = re.compile(r"\b(?:SELECT|INSERT|UPDATE|CREATE|ALTER|DELETE FROM|PERFORM|DECLARE|GRANT|REVOKE|COPY)\b")
_IGNORE, _IGNORE_FILE = "prose: ignore", "prose: ignore-file"


@dataclass(frozen=True)
class Finding:
    """One violation of a rule."""

    path: str
    line: int
    rule: str
    text: str


def plain(text: str) -> str:
    """Return prose without code spans, link targets and URLs."""
    text = re.sub(r"``[^`]+``|`[^`\n]+`", "CODE", text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return re.sub(r"\b(?:https?|nats|amqps?|kafkas?|postgresql)://\S+", "URL", text)


def private_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset in lines, and a description, of each private word in a text."""
    joined = plain(text)
    flat = joined.replace("\n", " ")
    found_any = _ANY_PRIVATE.search(flat) is not None
    for pattern, advice in _PRIVATE if found_any else ():
        for found in pattern.finditer(flat):
            offset = joined.count("\n", 0, found.start())
            yield offset, f"'{found.group()}' -> {advice}: {_around(joined, found.start())}"
    for found in _SENTENCE_WHO.finditer(flat):
        offset = joined.count("\n", 0, found.start())
        yield offset, f"'Who …' as a subject -> name the actor: {_around(joined, found.start())}"


def spelling(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset in lines, and the word, of each British spelling in a text."""
    joined = plain(text)
    for found in _BRITISH.finditer(joined):
        yield joined.count("\n", 0, found.start()), f"British spelling '{found.group()}'"


def _around(text: str, at: int) -> str:
    return " ".join(text[max(0, at - 40) : at + 50].split())


class PythonFile:
    """The findings in one Python file."""

    def __init__(self, path: str, source: str, documented: frozenset[str] = frozenset()) -> None:
        self.path = path
        self.documented = documented
        self.source = source
        self.lines = source.splitlines()
        self.parts = Path(path).parts
        self.is_test = "tests" in self.parts
        self.is_package = self.parts[0] not in ("tests", "benchmarks", "demo", "dags")
        self.is_public = _is_public(path) and not self.is_test

    def findings(self) -> Iterator[Finding]:
        """Yield every finding that `# prose: ignore` on its line does not skip."""
        for line, rule, text in self._all():
            if not (0 < line <= len(self.lines) and _IGNORE in self.lines[line - 1]):
                yield Finding(self.path, line, rule, text)

    def _all(self) -> Iterator[tuple[int, str, str]]:
        tree = ast.parse(self.source)
        nodes = list(ast.walk(tree))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        scopes: list[ast.Module | ast.ClassDef] = [tree, *classes]
        self._members = {id(one) for scope in scopes for one in scope.body}
        documented, in_string = set(), set[int]()
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._definition(node)
            elif isinstance(node, ast.Expr):
                value = node.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    documented.add(id(value))
                    yield from self._words(value.value, node.lineno)
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield from self._raised(node.exc)
            elif isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
                in_string.update(range(node.lineno, node.end_lineno or 0))
        for node in nodes if not self.is_test else ():
            yield from self._literal(node, documented)
            yield from self._keys(node)
        yield from self._comments(in_string)

    def _keys(self, node: ast.AST) -> Iterator[tuple[int, str, str]]:
        for key in node.keys if isinstance(node, ast.Dict) and self.is_package else ():
            text = None if key is None else _literal_text(key)
            if text and len(text.split()) >= 3 and not text.isupper() and not _TYPE_NAME.search(text):
                yield getattr(key, "lineno", 0), "sentence-as-key", text

    def _comments(self, in_string: set[int]) -> Iterator[tuple[int, str, str]]:
        for number, text in enumerate(self.lines, 1):
            found = _COMMENT.search(text) if "#" in text and number not in in_string else None
            if found:
                yield from self._words(found.group(), number)

    def _words(self, text: str, first: int) -> Iterator[tuple[int, str, str]]:
        for offset, found in private_words(text):
            yield first + offset, "private-word", found
        for offset, found in spelling(text):
            yield first + offset, "british-spelling", found

    def _definition(
        self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) -> Iterator[tuple[int, str, str]]:
        name = getattr(node, "name", Path(self.path).stem)
        line = getattr(node, "lineno", 1)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and name.startswith("test"):
            if TEST_START.match(name):
                yield line, "test-name", name
        elif tokens := PRIVATE_TOKENS.intersection(_CASE_CHANGE.sub("_", name).lower().split("_")):
            yield line, "private-identifier", f"{name}: {', '.join(sorted(tokens))}"
        text = ast.get_docstring(node)
        if text is None:
            if self.is_public and is_function and id(node) in self._members and self._needs_docstring(name):
                yield line, "missing-docstring", name
            return
        yield from self._docstring(name, node.body[0].lineno, text)

    def _needs_docstring(self, name: str) -> bool:
        return not name.startswith("_") and name not in INHERITED and name not in self.documented

    def _docstring(self, name: str, line: int, text: str) -> Iterator[tuple[int, str, str]]:
        # "Name: what it is" documents the part after the name.
        named = text.partition(":")[0].isidentifier()
        body = re.sub(r"^[A-Za-z_]\w*(?: and \w+)?: (?=\w)", "", text) if named else text
        found = re.match(r"[A-Za-z']+", body)
        first = found.group().lower() if found else ""
        if first in QUESTION_WORDS:
            yield line, "question-word-docstring", f"{name}: {_first_line(text)}"
        elif first in HEADLESS_WORDS:
            yield line, "headless-docstring", f"{name}: {_first_line(text)}"
        for paragraph in re.split(r"\n\s*\n", text):
            rows = paragraph.split("\n")
            if not _LAYOUT.search(paragraph) and len(rows) > MAX_PARAGRAPH_LINES:
                yield line, "dense-docstring", f"{name}: {len(rows)} lines without a blank line"

    def _raised(self, call: ast.Call) -> Iterator[tuple[int, str, str]]:
        if self.is_test or not call.args:
            return
        message = _literal_text(call.args[0])
        if message is not None and (words := re.findall(r"[A-Za-z_']+", message)):
            if message[0].islower() and words[0] in PRONOUNS:
                yield call.lineno, "message-pronoun", message
            if len(words) >= 3 and not message.endswith(": {}") and not _has_verb(words):
                yield call.lineno, "message-verb", message
        if len(call.args) > 1:
            hint = _literal_text(call.args[1])
            if hint and hint.rstrip().endswith("?") and not hint.startswith("did you mean"):
                yield call.lineno, "hint-question", hint

    def _literal(self, node: ast.AST, documented: set[int]) -> Iterator[tuple[int, str, str]]:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documented:
            return
        if len(node.value.split()) >= 3 and not _SQL.search(node.value):
            for offset, found in private_words(node.value):
                yield node.lineno + min(offset, node.value.count("\n")), "private-word-message", found


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def documented_methods(root: Path, names: list[str]) -> frozenset[str]:
    """Return the names of methods that a class of the public API documents: overrides need no docstring."""
    found: set[str] = set()
    for name in names:
        if name.endswith(".py") and _is_public(name):
            for one in _classes(ast.parse((root / name).read_text(encoding="utf-8"))):
                found |= {
                    part.name
                    for part in one.body
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(part)
                }
    return frozenset(found)


def _is_public(path: str) -> bool:
    """Return True if a module's classes are public: it is one of PUBLIC_PACKAGES, or is in one."""
    return not PUBLIC_PACKAGES.isdisjoint((Path(path).stem, Path(path).parent.name))


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _literal_text(node: ast.AST) -> str | None:
    """Return the text of a string or f-string, with {} for each interpolated value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _has_verb(words: list[str]) -> bool:
    return any(word.lower() in VERBS or re.fullmatch(r"\w{3,}(?:ed|n't)", word.lower()) for word in words)


def markdown_findings(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in one Markdown file; code blocks are skipped, table cells count as sentences."""
    in_code, block, first = False, [], 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = ""
        if in_code or _IGNORE in line:
            line = ""
        starts_item = bool(re.match(r"\s*(?:[-*+>]|\d+\.|\||#)\s*", line))
        if block and (not line.strip() or starts_item):
            yield from _block(path, first, "\n".join(block))
            block = []
        if line.strip():
            if not block:
                first = number
            block.append(line)


def _block(path: str, first: int, text: str) -> Iterator[Finding]:
    for offset, found in private_words(text):
        yield Finding(path, first + offset, "private-word-docs", found)
    for offset, found in spelling(text):
        yield Finding(path, first + offset, "british-spelling", found)
    cells = plain(text).split("|") if text.lstrip().startswith("|") else [plain(text)]
    for cell in cells:
        for sentence in re.split(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_\[A-Z0-9C])", cell):
            words = re.findall(r"[A-Za-z0-9][\w'’.,/-]*", sentence)
            if len(words) > MAX_SENTENCE_WORDS:
                start = " ".join(sentence.split())[:90]
                yield Finding(path, first, "long-sentence", f"{len(words)} words: {start}")


def source_files(root: Path) -> list[str]:
    """Return the Python and Markdown files of a repository, relative to its root."""
    found = [*root.glob("*.md")]
    for folder in _FOLDERS:
        found += [*(root / folder).rglob("*.py"), *(root / folder).rglob("*.md")]
    names = sorted(path.relative_to(root) for path in found)
    return [str(name) for name in names if not any(part.startswith(".") for part in name.parts)]


def check(root: Path) -> Iterator[Finding]:
    """Yield the findings in a repository, file by file."""
    names = source_files(root)
    documented = documented_methods(root, names)
    for name in names:
        text = (root / name).read_text(encoding="utf-8")
        if _IGNORE_FILE in text[:2000]:
            continue
        if name.endswith(".md"):
            yield from markdown_findings(name, text)
        else:
            yield from PythonFile(name, text, documented).findings()
