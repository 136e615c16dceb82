"""Sources composed of several columns, with expected values written by hand."""

import decimal
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import config as run_config
from fedveil.config import parse_source_template
from fedveil.data.source_template import SourceTemplate
from fedveil.errors import ConfigError


def of(template: str, column: str = "text") -> SourceTemplate:
    return SourceTemplate.from_task(
        run_config.parse({"task.source-template": template, "task.source-column": column}).task
    )


ALPACA = "{instruction}\n\n{input}"


@pytest.mark.parametrize(("template", "values", "source"), [
    (ALPACA, {"instruction": "Add.", "input": "1, 2"}, "Add.\n\n1, 2"),
    (ALPACA, {"instruction": "Add.", "input": ""}, "Add."),
    (ALPACA, {"instruction": "Add.", "input": None}, "Add."),
    (ALPACA, {"instruction": "Add."}, "Add."),
    (ALPACA, {"instruction": " \n", "input": "1"}, "1"),
    (ALPACA, {"instruction": "", "input": None}, None),
    ("Age {age}: {note} ({age})", {"age": 7, "note": "a\nb "}, "Age 7: a\nb  (7)"),
    ("{age} {weight}", {"age": decimal.Decimal("7.50"), "weight": True}, "7.50 true"),
    ("{a!r}:{b:>10}", {"a!r": "x", "b:>10": "y"}, "x:y"),
    ("Answer {{x}}: {q}", {"q": "{a} {{b}}"}, "Answer {x}: {a} {{b}}"),
    ("{chief complaint}{a.b[0]}", {"chief complaint": "x", "a.b[0]": "y"}, "xy"),
    (ALPACA, {"instruction": "Add.", "input": ["1"]}, None),
    (ALPACA, {"instruction": "Add.", "input": float("nan")}, None),
    (ALPACA, {"instruction": {"a": 1}, "input": "1"}, None),
    ("", {"text": " as it is\n"}, " as it is\n"),
    ("", {"text": " "}, None),
    ("", {"text": None}, None),
])  # fmt: skip
def test_the_source_of_a_row(template, values, source):
    assert of(template).fill(values) == source


def test_columns_are_those_that_the_template_names():
    assert of("{b} {a} {b}").columns == ("b", "a")
    assert of("", "text").columns == ("text",)
    assert of("").describe_columns() == 'column "text"'
    assert of("{b} {a}").describe_columns() == 'at least one of the columns "b", "a"'
    assert of("{b} {a}").describe_values({"b": "secret", "a": ["x"]}) == "a text of 6 characters, a list of 1 entries"


@pytest.mark.parametrize(("template", "message"), [
    ("no column", "expected from 1 to 16 columns in braces, found 0"),
    ("".join(f"{{c{i}}}" for i in range(17)), "found 17"),
    ("{}", r'found "{}" at character 1'),
    ("ab{ }", r'found "{ }" at character 3'),
    ("{a", r'found "{" at character 1'),
    ("{a}}", r'found "}" at character 4'),
    ("{a:{b}}", r'found "{" at character 1'),
    ("x" * 4097 + "{a}", "at most 4,096 characters, found 4,100"),
])  # fmt: skip
def test_what_is_no_template_is_refused(template, message):
    with pytest.raises(ConfigError, match=r"task\.source.template: .*" + re.escape(message)):
        of(template)


TEXTS = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"]), max_size=20)
COLUMNS = TEXTS.map(str.strip).filter(bool)


@given(st.lists(st.tuples(TEXTS, COLUMNS), min_size=1, max_size=9), TEXTS)
def test_a_template_is_the_texts_between_its_columns(parts, last):
    """Any value, also one with braces or the name of another column, stands in the source as it is."""
    template = "".join(f"{text}{{{column}}}" for text, column in parts) + last
    assert parse_source_template(template) == (*parts, (last, ""))
    values = {column: "{" + column + "}{x" for _, column in parts}
    assert of(template).fill(values) == ("".join(text + values[column] for text, column in parts) + last).strip()
