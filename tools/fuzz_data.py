"""Mutate data files and read them as a site would: each must give rows, or an error that names the file.

    python -m tools.fuzz_data 100000 --seed 7        prints the counts; exits with 1 if a case is wrong

A case is one file of rows or one image, with one to four mutations. A child process
reads the cases, so that crashes and memory exhaustion are detected too. Case N of a seed is the same in every run.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import fuzz

MARK = "Quendolin"  # part of every value, so that it must not appear in any message
KINDS = ("jsonl", "csv", "json", "csv.gz", "parquet", "arrow", "image", "dicom", "xlsx", "nii", "nii.gz")
_IMAGES = ("image", "dicom", "nii", "nii.gz")
_MOST_SECONDS = 30.0  # of CPU
_MOST_BYTES = 8 << 30  # of a child's address space
_GRAYS = ("MONOCHROME1 ", "MONOCHROME2 ")
_LONGEST = 2000  # characters of a message


def make_case(seed: int, number: int) -> tuple[str, bytes]:
    """Return the file extension and the content of a mutated file."""
    draw = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    content = _SEEDS[kind](draw)
    return kind, fuzz.mutate_bytes(content, draw) if draw.random() < 0.5 else _flip_bytes(content, draw)


def _flip_bytes(content: bytes, draw: random.Random) -> bytes:
    """Change one to three bits, which leaves most files partly readable."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def judge_case(kind: str, content: bytes, folder: Path) -> str:
    """Return "rows" or "refused"; otherwise describe what went wrong when reading the file."""
    from fedveil.errors import TaskError

    file = folder / f"train.{kind}"
    started = time.process_time()
    try:
        if kind in _IMAGES:
            _decode(content, f"row 7 of {file}")
        else:
            file.write_bytes(content)
            _read(folder)
        verdict = "rows"
    except TaskError as error:
        verdict, text = "refused", str(error)
        if str(folder) not in text and "row 7" not in text:
            verdict = f"no file in the message: {text[:300]}"
        elif MARK in text and "expected column" not in text:  # messages may show column names
            verdict = f"a value in the message: {text[:300]}"
        elif len(text) > _LONGEST:
            verdict = f"a message of {len(text)} characters: {text[:300]}"
        elif error.__cause__ is not None:
            verdict = f"an error that carries another one: {type(error.__cause__).__name__}"
    except Exception as error:  # these errors are what the fuzzer searches for
        frames = _frames(error)
        verdict = f"{type(error).__name__}: {str(error)[:200]} at {frames}"
    finally:
        file.unlink(missing_ok=True)
    seconds = time.process_time() - started
    return verdict if seconds < _MOST_SECONDS else f"{seconds:.0f} s: {verdict}"


def _frames(error: BaseException) -> str:
    import traceback

    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/fedveil/" in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-3:]))


def _read(folder: Path) -> None:
    from fedveil import tasks
    from fedveil.config import parse
    from fedveil.data import file_probe, tables, units
    from fedveil.data.split_files import split_files

    config = parse({"task.name": "text-generation", "task.source-column": "mr", "task.target-column": "ref"})
    table = tables.read_for_task(folder, "train", tasks.task_info("text-generation"), config.task)
    for example in table.examples("train", None, config):
        if not example.where:
            raise AssertionError("a row without a place")
    (file,) = split_files(folder, "train")
    file_probe.probe_files([file], ("mr", "ref"))
    list(file_probe.first_rows(file, "mr", 5))
    units.count_units(file, "mr")


def _decode(content: bytes, where: str) -> None:
    from fedveil.data.image_decoding import decode_image, image_conversions

    image_conversions(content, where)
    picture = decode_image(content, where)
    if picture.mode != "RGB":
        raise AssertionError(f"an image in the mode {picture.mode}")


def _rows(draw: random.Random) -> list[dict[str, Any]]:
    more: dict[str, Any] = draw.choice(({}, {"age": 7}, {"when": 1.5, "tags": [MARK]}, {"about": {"a": None}}))
    return [{"mr": f"{MARK} {i}", "ref": f"{MARK}\u00e9 {draw.random()}", **more} for i in range(draw.randint(1, 12))]


def _jsonl(draw: random.Random) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=draw.random() < 0.5) + "\n" for row in _rows(draw)).encode()


def _json(draw: random.Random) -> bytes:
    rows = _rows(draw)
    return json.dumps(
        rows if draw.random() < 0.5 else {"data": rows, "version": 1}, indent=draw.choice((None, 1))
    ).encode()


def _csv(draw: random.Random) -> bytes:
    import csv

    out, separator = io.StringIO(), draw.choice(",;\t|")
    writer = csv.writer(out, delimiter=separator, quoting=draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)))
    writer.writerow(["mr", "ref", "x"])
    writer.writerows([[row["mr"], row["ref"], f'a{separator}\n"b'] for row in _rows(draw)])
    return out.getvalue().encode(draw.choice(("utf-8", "utf-8", "cp1252", "utf-16", "utf-8-sig")))


def _table(draw: random.Random) -> Any:
    import datetime

    import pyarrow

    count = draw.randint(1, 300)
    columns: dict[str, Any] = {
        "mr": [f"{MARK} {i}" for i in range(count)],
        "ref": pyarrow.array([f"{MARK} {i % 3}" for i in range(count)]),
        "when": [datetime.datetime(2020, 1, 1)] * count,
        "nested": [[i, None] for i in range(count)],
    }
    if draw.random() < 0.5:
        columns["ref"] = columns["ref"].dictionary_encode()
    return pyarrow.table(columns)


def _parquet(draw: random.Random) -> bytes:
    import pyarrow.parquet

    out = io.BytesIO()
    codec = draw.choice(("snappy", "none", "zstd", "gzip"))
    pyarrow.parquet.write_table(_table(draw), out, compression=codec, row_group_size=draw.choice((50, 1000)))
    return out.getvalue()


def _arrow(draw: random.Random) -> bytes:
    import pyarrow

    out, table = io.BytesIO(), _table(draw)
    opened = pyarrow.ipc.new_stream if draw.random() < 0.5 else pyarrow.ipc.new_file
    with opened(out, table.schema) as stream:
        stream.write_table(table)
    return out.getvalue()


def _image(draw: random.Random) -> bytes:
    import numpy as np
    from PIL import Image

    size, out = (draw.randint(1, 24), draw.randint(1, 24)), io.BytesIO()
    numbers = np.random.default_rng(draw.randrange(1 << 32))
    form, mode = draw.choice(
        (("PNG", "RGB"), ("PNG", "I;16"), ("PNG", "P"), ("PNG", "LA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"),
         ("TIFF", "I;16"), ("TIFF", "F"), ("TIFF", "RGB"), ("BMP", "RGB"), ("WEBP", "RGB"), ("PPM", "L"))
    )  # fmt: skip
    if mode in ("I;16", "F"):
        kind = np.uint16 if mode == "I;16" else np.float32
        picture = Image.fromarray((numbers.random(size[::-1]) * 999).astype(kind))
    else:
        picture = Image.fromarray(numbers.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).convert(mode)
    more: dict[str, Any] = {"save_all": True, "append_images": [picture.rotate(90)]} if form == "GIF" else {}
    picture.save(out, form, **more)
    return out.getvalue()


def _xlsx(draw: random.Random) -> bytes:
    """Return a workbook with one sheet of texts and numbers. Half of the sheets are mutated before they are packed."""
    import zipfile

    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    lines = [("mr", "ref"), *((row["mr"], row["ref"]) for row in _rows(draw))]
    cells = "".join(
        f'<row r="{at}">'
        + "".join(
            f'<c r="{"AB"[i]}{at}" t="inlineStr"><is><t>{text}</t></is></c>'
            if draw.random() < 0.8 or at == 1
            else f'<c r="{"AB"[i]}{at}"><f>1+1</f><v>2.5</v></c>'
            for i, text in enumerate(line)
        )
        + "</row>"
        for at, line in enumerate(lines, start=1)
    )
    sheet = f'<worksheet xmlns="{main}"><dimension ref="A1:B9"/><sheetData>{cells}</sheetData></worksheet>'.encode()
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="rId1" '
        f'Type="{office}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets><sheet name="{MARK}" sheetId="1" '
        'r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="rId1" '
        f'Type="{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # the same date each time
        mutated = fuzz.mutate_bytes(sheet, draw) if draw.random() < 0.5 else sheet
        archive.writestr(zipfile.ZipInfo("xl/worksheets/sheet1.xml"), mutated, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _nifti(draw: random.Random) -> bytes:
    """Return a volume whose header texts name the patient."""
    import struct

    code, kind, size = draw.choice(((2, 8, 1), (4, 16, 2), (16, 32, 4), (512, 16, 2)))
    shape = [draw.randint(1, 6) for _ in range(draw.choice((2, 3)))]
    header = bytearray(348)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into(f"<{1 + len(shape)}h", header, 40, len(shape), *shape)
    struct.pack_into("<hh", header, 70, code, kind)
    struct.pack_into("<fff", header, 108, 352.0, draw.choice((0.0, 1.0, 2.0)), draw.choice((0.0, -5.0)))
    struct.pack_into("<ff", header, 124, draw.choice((0.0, 200.0)), 0.0)
    header[148 : 148 + len(MARK)] = MARK.encode()
    header[344:348] = b"n+1\0"
    count = 1
    for length in shape:
        count *= length
    return bytes(header) + bytes(4) + draw.randbytes(count * size)


def _dicom(draw: random.Random) -> bytes:
    """Return a gray or color DICOM file without compression, in which every text names the patient."""
    import struct

    rows, columns, is_color = draw.randint(1, 9), draw.randint(1, 9), draw.random() < 0.3
    bits = 8 if is_color else draw.choice((8, 16))
    texts = {
        0x00100010: ("PN", MARK),
        0x00281050: ("DS", "40 "),
        0x00281051: ("DS", "400 "),
        0x00281052: ("DS", "-1024 "),
    }
    texts[0x00280004] = ("CS", draw.choice(("RGB ", "YBR_FULL")) if is_color else draw.choice(_GRAYS))
    if draw.random() < 0.5:
        del texts[0x00281050], texts[0x00281051]
    numbers = {0x00280002: 3 if is_color else 1, 0x00280006: 0, 0x00280010: rows, 0x00280011: columns,
               0x00280100: bits, 0x00280101: bits, 0x00280102: bits - 1, 0x00280103: 0}  # fmt: skip
    elements = {tag: (kind, text.encode() + b" " * (len(text) % 2)) for tag, (kind, text) in texts.items()}
    elements |= {tag: ("US", struct.pack("<H", number)) for tag, number in numbers.items()}
    pixels = draw.randbytes(rows * columns * (3 if is_color else 1) * bits // 8)
    out = b"\0" * 128 + b"DICM\x02\0\x10\0UI\x14\0" + b"1.2.840.10008.1.2.1\0"
    for tag, (kind, value) in sorted(elements.items()):
        out += struct.pack("<HH2sH", tag >> 16, tag & 0xFFFF, kind.encode(), len(value)) + value
    pixels += b"\0" * (len(pixels) % 2)
    return out + struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OW", 0, len(pixels)) + pixels


_SEEDS: dict[str, Callable[[random.Random], bytes]] = {
    "jsonl": _jsonl, "csv": _csv, "json": _json, "csv.gz": lambda draw: gzip.compress(_csv(draw), mtime=0),
    "parquet": _parquet, "arrow": _arrow, "image": _image, "dicom": _dicom, "xlsx": _xlsx,
    "nii": _nifti, "nii.gz": lambda draw: gzip.compress(_nifti(draw), mtime=0),
}  # fmt: skip


def run_cases(seed: int, first: int, last: int, out: Any = sys.stdout) -> None:
    """Judge the cases from `first` up to, but not including, `last`; write a line before and after each."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for number in range(first, last):
            print(json.dumps({"case": number}), file=out, flush=True)
            kind, content = make_case(seed, number)
            print(json.dumps({"kind": kind, "verdict": judge_case(kind, content, Path(folder))}), file=out, flush=True)


def search(seed: int, first: int, last: int) -> tuple[Counter[str], list[str]]:
    """Judge the cases in child processes. Return the number of cases per verdict, and the wrong cases."""
    counts, wrong = Counter[str](), list[str]()
    while first < last:
        command = [sys.executable, "-m", "tools.fuzz_data", "--child", str(seed), str(first), str(last)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert child.stdout is not None
        at, is_judged = first, True
        for line in child.stdout:
            said = json.loads(line)
            if "case" in said:
                at, is_judged = int(said["case"]), False
                continue
            is_judged = True
            verdict = said["verdict"]
            counts[f"{said['kind']}: {verdict if verdict in ('rows', 'refused') else 'wrong'}"] += 1
            if verdict not in ("rows", "refused"):
                wrong.append(f"case {at} of seed {seed}: {said['kind']}: {verdict}")
        code = child.wait()
        if is_judged and code == 0:
            break
        wrong.append(f"case {at} of seed {seed}: the process ended with {code}")
        first = at + 1
    return counts, wrong


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first case (default: 0)")
    parser.add_argument("--child", type=int, nargs=3, metavar=("SEED", "FIRST", "LAST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        run_cases(*args.child)
        return 0
    counts, wrong = search(args.seed, args.first, args.first + args.cases)
    for name, count in sorted(counts.items()):
        print(f"{name} {count}")
    for line in wrong:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
