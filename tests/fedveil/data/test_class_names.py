"""Class names: the same numbering at all sites, numbers as text, and no label in a message."""

from __future__ import annotations

import pytest

from fedveil.config import parse
from fedveil.contract.task import Example, ExampleOrigin
from fedveil.data.class_names import ClassNumbering, are_numbers, format_class_names
from fedveil.errors import ConfigError, TaskError

SECRET = "Mrs. Miller, born 1931"


def numbering(names: str = "", model: tuple[str, ...] = (), classes: int = 0) -> ClassNumbering:
    task = parse({"task.class-names": names, "task.target-column": "y"}).task
    return ClassNumbering(task, lambda: model, lambda: classes)


def row(value: object, *declared: str, folder: str = "site") -> Example:
    return Example({"y": value}, ExampleOrigin("train.jsonl", 7), folder, declared)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        (" normal ,pneumonia", ("normal", "pneumonia")),
        ('"edema, mild", normal', ("edema, mild", "normal")),
        ('5" lesion,"a ""b"""', ('5" lesion', 'a "b"')),
    ],
)
def test_names_are_one_line_of_comma_separated_values(text, names):
    assert parse({"task.class-names": text}).task.class_list == names
    if names:
        line = format_class_names(names).removeprefix("task.class-names = ")
        import tomllib

        assert parse({"task.class-names": tomllib.loads(f"line = {line}")["line"]}).task.class_list == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,,b", "none of them empty or repeated"),
        ("a,b,", "none of them empty or repeated"),
        ("a, a", "none of them empty or repeated"),
        ("a\nb", "expected printable names on one line"),
        ('"a,b', "expected names separated by commas"),
        ("x" * 201, "at most 200 characters"),
        (",".join(map(str, range(50_001))), "at most 50,000 names"),
    ],
)
def test_names_that_cannot_be_are_refused_with_the_key(text, message):
    with pytest.raises(ConfigError, match=f"task.class-names: .*{message}"):
        parse({"task.class-names": text})


def test_numbers_as_text_are_numbers_and_not_sorted_as_names():
    """Sorted as names, "10" would be 2 and "2" would be 3."""
    plain = numbering(classes=11)
    assert [plain.number(row(v)) for v in ("1", "2", "10", 10, 0, " 3 ")] == [1, 2, 10, 10, 0, 3]
    for wrong in ("11", 11, -1, "-1", "02", "1.0", 1.0, True, None, "", [1], "9" * 5000):
        with pytest.raises(TaskError, match="expected a class from 0 to 10, or its name, .*row 7 of train.jsonl"):
            plain.number(row(wrong))
    assert are_numbers(["0", "10", "2"])
    assert not are_numbers(["0", "x"])


def test_the_config_s_names_decide_whatever_a_site_declares():
    given = numbering("normal, pneumonia")
    assert [given.number(row(v)) for v in ("pneumonia", " normal ", 1, "0")] == [1, 0, 1, 0]
    assert [given.number(row(v, "pneumonia", "normal")) for v in (0, 1, "pneumonia")] == [1, 0, 1]
    assert given.number(row(0, "pneumonia")) == 1  # a site without the other class
    given.require_shared()
    with pytest.raises(TaskError, match="expected a class from 0 to 1"):
        given.number(row(2, "pneumonia", "normal"))


def test_names_that_are_integers_are_names():
    given = numbering("1, 2, 10")
    assert [given.number(row(v)) for v in (10, "2", 1)] == [2, 1, 0]
    with pytest.raises(TaskError, match="expected a class from 0 to 2, or its name"):
        given.number(row(0))
    assert numbering("false,true").number(row(True)) == 1


def test_a_site_with_other_names_is_refused_with_both_lists():
    given = numbering("normal, pneumonia")
    with pytest.raises(
        TaskError,
        match=r'classes of "site" among the 2 of the run \(normal, pneumonia\), found 2 \(Pneumonia, normal\); '
        r"the unknown ones are Pneumonia",
    ):
        given.number(row("normal", "Pneumonia", "normal"))
    many = tuple(f"class {i} {'x' * 500}" for i in range(5000))
    with pytest.raises(TaskError, match="and 4,976 more") as caught:
        given.number(row(0, *many))
    assert len(str(caught.value)) < 6000


def test_in_one_process_the_first_data_set_numbers_the_classes_of_all():
    first = numbering(classes=2)
    assert first.number(row("b", "a", "b")) == 1
    assert first.number(row(0, "b", "a")) == 1
    with pytest.raises(TaskError, match=r"among the 2 known so far \(a, b\), found 2 \(a, covid\)"):
        first.number(row("a", "a", "covid"))
    with pytest.raises(TaskError, match="the model has .* classes, but .* names 3"):
        numbering(classes=2).number(row("a", "a", "b", "c"))


def test_other_sites_need_names_in_the_config_and_the_message_has_the_line():
    first = numbering()
    first.require_shared()  # integers
    first.note(("edema, mild", "normal"), "site")
    with pytest.raises(TaskError, match="add this line to the run config: ") as caught:
        first.require_shared()
    assert str(caught.value).endswith('task.class-names = "\\"edema, mild\\",normal"')
    long = numbering()
    long.note(tuple(f"class {i}" for i in range(1000)), "site")
    with pytest.raises(TaskError, match="all 1,000 names, separated by commas"):
        long.require_shared()


def test_names_of_the_model_number_all_sites_alike():
    named = numbering(model=("dog", "bird", "cat"), classes=3)
    named.note(("bird", "cat"), "site")
    named.require_shared()
    assert [named.number(row(v, "bird", "cat")) for v in ("cat", 0)] == [2, 1]
    assert numbering(model=("dog", "bird", "cat"), classes=3).number(row("cat")) == 2
    other = numbering(model=("dog", "bird", "cat"), classes=3)
    other.note(("ox", "sheep", "cow"), "site")
    with pytest.raises(TaskError, match="ox,sheep,cow"):
        other.require_shared()


def test_a_text_that_is_no_name_is_refused_and_not_quoted():
    for given in (numbering(), numbering("a,b"), numbering(model=("a", "b"), classes=2)):
        with pytest.raises(TaskError, match=r"found a text of 22 characters in row 7 of train.jsonl") as caught:
            given.number(row(SECRET))
        assert "Miller" not in str(caught.value)
