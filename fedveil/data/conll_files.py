"""CoNLL files: one word per line, with its tag in the last column, and an empty line between sentences.

| in the file | how it is read |
|---|---|
| columns | separated by tabs if the first line with a word has a tab, otherwise by spaces; every line has the same
  number |
| the first and the last column | WORDS and TAGS; the columns in between are not read |
| -DOCSTART- in the first column | skipped, because it only marks the start of a document |
| three or more columns, of which the first numbers the words or has only numbers | refused, because the words are in a
  different column |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedveil.errors import TaskError

__all__ = ["CONLL_SUFFIXES", "TAGS", "WORDS", "describe_conll", "parse_sentences"]

CONLL_SUFFIXES = (".conll", ".iob", ".iob2", ".bio")
WORDS, TAGS = "tokens", "ner_tags"  # the column names that `datasets` uses in such data sets
MAX_WORDS = 100_000  # in a sentence
_DOCUMENT = "-DOCSTART-"
_SPACE = " \t\r\n"


def parse_sentences(lines: Iterable[bytes], file: Path) -> Iterator[dict[str, list[str]]]:
    """Yield the sentences of a file, given its lines in UTF-8, as {"tokens": [...], "ner_tags": [...]}.

    Raises:
        TaskError: a line has a different number of columns, or the first column has no words.
    """
    separator, width = "", 0
    count, is_numbered = 0, True  # the number of words, and whether all of them are numbers
    words, tags = list[str](), list[str]()
    for number, line in enumerate(lines, start=1):
        text = line.decode("utf-8").strip("\r\n")
        if not text.strip(_SPACE) or _begins_document(text):
            if words:
                yield _sentence(words, tags, width, number - 1, file)
            words, tags = [], []
            continue
        separator = separator or ("\t" if "\t" in text else " ")
        columns = _columns(text, separator)
        width = width or len(columns)
        if len(columns) < 2 or len(columns) != width or not columns[0] or not columns[-1]:
            kind = "tabs" if separator == "\t" else "spaces"
            raise TaskError(
                f'task.data: expected a word and its tag in line {number:,} of "{file}", and {max(2, width)} columns '
                f"with {kind} between them as before, found {len(columns)}{'' if all(columns) else ', one empty'}; "
                "correct the line"
            )
        count, is_numbered = count + 1, is_numbered and columns[0].isdecimal()
        words.append(columns[0])
        tags.append(columns[-1])
        if len(words) > MAX_WORDS:
            raise TaskError(
                f'task.data: the sentence before line {number:,} of "{file}" has more than {MAX_WORDS:,} words; '
                "put an empty line between sentences"
            )
    if words:
        yield _sentence(words, tags, width, number, file)
    if width > 2 and count > 1 and is_numbered:
        raise _no_words("only numbers", file)


def describe_conll(lines: Iterable[bytes]) -> str:
    """Describe how the columns of a file with these lines are read; "" if there are no lines."""
    for line in lines:
        text = line.decode("utf-8").strip("\r\n")
        if text.strip(_SPACE) and not _begins_document(text):
            separator = "\t" if "\t" in text else " "
            kind = "tabs" if separator == "\t" else "spaces"
            return (
                f"words and tags are the first and the last of {len(_columns(text, separator))} columns between {kind}"
            )
    return ""


def _begins_document(text: str) -> bool:
    return re.split("[ \t]", text.lstrip(_SPACE), maxsplit=1)[0] == _DOCUMENT


def _columns(text: str, separator: str) -> list[str]:
    return [part.strip(" ") for part in text.split("\t")] if separator == "\t" else re.split(" +", text.strip(" "))


def _sentence(words: list[str], tags: list[str], width: int, line: int, file: Path) -> dict[str, list[str]]:
    if width > 2 and len(words) > 1 and words[0] in ("0", "1"):
        first = int(words[0])
        if words == [str(number) for number in range(first, first + len(words))]:
            raise _no_words(f"the numbers of the words before line {line + 1:,}", file)
    return {WORDS: words, TAGS: tags}


def _no_words(found: str, file: Path) -> TaskError:
    return TaskError(
        f'task.data: expected words in the first column of "{file}", found {found}; put the words into the first '
        "column, and the tags into the last"
    )
