"""Docstrings and comments are sentences, or noun phrases that name a thing; names and texts use the field's words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from test_rules import PACKAGE, Source, sources

FRAGMENTS = ("What", "Those", "Of", "By", "Whose", "That", "Which", "On", "From", "With", "Behind")
"""First words of a docstring or comment that has no subject."""
COMMENT_FRAGMENTS = ("Those", "Whose")
"""The same of comments, which may say of what kind a value is (``# By name``)."""
BANNED_IN_TEXT = ("stay", "stays", "stayed", "late", "lack", "lacks", "lacked", "lost", "beside")
BANNED_IN_NAMES = (
    *("air", "land", "lands", "landed", "late", "lack", "lacks", "lost", "stay", "stays", "room", "rooms"),
    *("said", "beside", "together", "turn", "turns", "place", "places", "placed"),
)
"""Parts of names between underscores or capitals: words that stood for too many things, or for none of the field's."""


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, of attributes too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every comment that begins one; a line below another comment goes on with it."""
    before = -1
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != before + 1:
                yield token.start[0], token.string.lstrip("# ")
            before = token.start[0]


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Line and name of everything that ``source`` defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def parts(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def complaints(source: Source) -> Iterator[str]:
    for line, text in docstrings(source):
        words = re.findall(r"[A-Za-z']+", text)
        if words and words[0] in FRAGMENTS and not text.startswith("``"):
            yield f"{source.path}:{line}: a fragment: {text.strip().splitlines()[0]}"
        for word in sorted({word.lower() for word in words}.intersection(BANNED_IN_TEXT)):
            yield f"{source.path}:{line}: the word {word!r}: {text.strip().splitlines()[0]}"
    for line, text in comments(source):
        words = re.findall(r"[A-Za-z']+", text)
        if words and words[0] in COMMENT_FRAGMENTS:
            yield f"{source.path}:{line}: a fragment: {text}"
        for word in sorted({word.lower() for word in words}.intersection(BANNED_IN_TEXT)):
            yield f"{source.path}:{line}: the word {word!r}: {text}"
    for line, name in sorted(set(names(source))):
        for word in sorted(parts(name).intersection(BANNED_IN_NAMES)):
            yield f"{source.path}:{line}: the name {name}: {word!r}"


def test_texts_are_sentences_and_names_are_the_fields():
    checked = sources(*PACKAGE)
    assert len(checked) > 300
    found = [each for source in checked for each in complaints(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    (
        'def f():\n    """What of the host is told to the device."""',
        'x = 1\n"""Those that put it in."""',
        'x = 1\n"""Of one layer."""',
        'def f():\n    """By name, the layers."""',
        'def f():\n    """Return the gradient, which is late."""',
        "x = 1  # It stays on the device.",
        "x = 1  # Those of others.",
        "said = 1",
        "def take_turn(): ...",
        "class LostPlaces: ...",
    ),
)
def test_a_fragment_or_a_banned_word_is_noticed(text):
    assert list(complaints(Source("ds_npu/x.py", text)))


@pytest.mark.parametrize(
    "text",
    (
        'def f():\n    """Return what the host was told."""',
        'x = 1\n"""Rows sent to each rank."""',
        'x = 1\n"""``by`` is a name."""',
        "placement = related = airy = 1",
        "def returned(x): ...",
    ),
)
def test_a_sentence_is_not_noticed(text):
    assert not list(complaints(Source("ds_npu/x.py", text)))
