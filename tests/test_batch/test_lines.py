"""Lines end at byte 0x0A alone; whatever one line holds, the next is read."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.batch import lines
from moe.batch.lines import BadLine, Line, LineParser, content_of, dump_line, read_lines

SEPARATORS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]


def read(data: bytes, limit: int | None = None) -> list[Line | BadLine]:
    return list(read_lines(io.BytesIO(data), limit))


@pytest.mark.parametrize("char", SEPARATORS)
def test_c35_other_line_ends_stay_inside_a_record(char: str) -> None:
    raw = char if ord(char) >= 0x20 else json.dumps(char)[1:-1]  # JSON itself wants control characters escaped
    data = f'{{"id":"a","prompt":"x{raw}y"}}\n{{"id":"b"}}'.encode()
    assert read(data) == [Line(1, {"id": "a", "prompt": f"x{char}y"}), Line(2, {"id": "b"})]


@pytest.mark.parametrize("char", SEPARATORS)
def test_c35_written_records_survive_any_line_splitter(char: str) -> None:
    record = {"text": f"a{char}b", "é": "日本"}
    written = dump_line(record)
    assert written.endswith(b"\n") and len(written.decode().splitlines()) == 1
    assert read(written) == [Line(1, record)]
    assert "日本" in written.decode()  # readable where nothing forces an escape


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.lists(st.text(), max_size=3), max_size=4))
def test_any_record_reads_back(record: dict) -> None:
    written = dump_line(record)
    assert written.count(b"\n") == 1
    assert read(written) == [Line(1, record)]


def test_bom_crlf_blank_lines_and_no_last_end() -> None:
    data = b'\xef\xbb\xbf{"a":1}\r\n\n  \r\n{"a":2}\n{"a":3}'
    assert read(data) == [Line(1, {"a": 1}), Line(4, {"a": 2}), Line(5, {"a": 3})]


def test_a_bom_is_accepted_at_the_very_beginning_only() -> None:
    first, second = read(b'{"a":1}\n\xef\xbb\xbf{"a":2}\n')
    assert first == Line(1, {"a": 1})
    assert isinstance(second, BadLine) and second.number == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"id":"2","prompt": ', "not JSON: Expecting value at column 21"),
        (b"[1,2,3]", "a JSON object is needed, this is a list"),
        (b"null", "a JSON object is needed, this is null"),
        (b'"x"', "a JSON object is needed, this is a text"),
        (b"17", "a JSON object is needed, this is a number"),
        (b"true", "a JSON object is needed, this is a truth value"),
        (b'{"t":NaN}', "not JSON: NaN is no number"),
        (b"NaN", "not JSON: NaN is no number"),
        (b"1e999", "a number is too large: beyond 1.8e308"),
        (b'{"t":-Infinity}', "not JSON: -Infinity is no number"),
        (b"\xff\xfe", "byte 1 is not UTF-8: invalid start byte"),
        (b'{"a":"\xe4\xb8"}', "byte 7 is not UTF-8: invalid continuation byte"),
        (b'{"a":1,"a":2}', "key 'a' stands twice in one object"),
        (b"[" * 200_000, "not usable JSON: nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "a number is too large: 5,000 digits"),
        (b"9" * 5000, "a number is too large: 5,000 digits"),
        (rb'{"a":"\ud83d"}', "half of a surrogate pair"),
        (b'{"a":1}{"b":2}', "not JSON: Extra data at column 8"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply: more than 100 lists and objects"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "nested too deeply: more than 100 lists and objects"),
    ],
)
def test_a_bad_line_has_its_reason_and_the_next_is_read(data: bytes, reason: str) -> None:
    bad, good = read(data + b'\n{"ok":1}\n')
    assert isinstance(bad, BadLine) and bad.number == 1
    assert reason in bad.reason and "\n" not in bad.reason
    assert good == Line(2, {"ok": 1})


def test_a_hundred_levels_and_many_lists_side_by_side_are_read() -> None:
    deepest = b'{"a":' + b"[" * 99 + b"]" * 99 + b"}"
    wide = b'{"a":[' + b",".join([b"[]"] * 500) + b"]}"
    assert all(isinstance(line, Line) for line in read(deepest + b"\n" + wide))


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert read(rb'{"a":"\ud83d\ude00"}') == [Line(1, {"a": "😀"})]


@pytest.mark.parametrize("longer", [1, 100, 101])  # ends inside the second read, with it, and after it
def test_a_line_beyond_the_limit_is_skipped_whole(longer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    bad, good = read(b'{"a":"' + b"x" * (92 + longer) + b'"}\n{"ok":1}\n')
    assert isinstance(bad, BadLine) and "longer than" in bad.reason
    assert good == Line(2, {"ok": 1})
    assert read(b'{"a":"' + b"x" * 92 + b'"}\n') == [Line(1, {"a": "x" * 92})]  # exactly the limit


def test_limit_counts_records_not_blank_lines() -> None:
    assert read(b'\n{"a":1}\n\nnope\n{"a":3}\n', limit=2) == [
        Line(2, {"a": 1}),
        BadLine(4, "not JSON: Expecting value at column 1"),
    ]


# Texts of JSON with all that the two readers could see differently: keys twice, colons in texts and escaped, numbers of
# any size and form, halves of pairs, white space, depth.
numbers = st.one_of(
    st.sampled_from(["-0", "-0.0", "1E5", "1e400", "-1e999", "5e-324", "NaN", "-Infinity", "01", "1.", "9" * 5000]),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?[0-9]{1,25}\.[0-9]{1,25}[eE][+-]?[0-9]{1,3}", fullmatch=True),
)
pieces = st.sampled_from(
    ["a", ":", r"\u003a", r"\u003A", r"\\u003a", r"\ud83d", r"\ude00", "é", "\x7f", "\u2028", r"\"", r"\n", "[", "{,"]
)
quoted = st.lists(pieces, max_size=4).map(lambda parts: f'"{"".join(parts)}"')
keys = st.sampled_from(['"a"', '"b"', r'"\u0061"', '":"', r'"\u003a"'])
spaces = st.sampled_from(["", "", " ", "\t", "\r"])


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(keys, spaces, inner).map(lambda pair: f"{pair[0]}{pair[1]}:{pair[2]}"), max_size=4)
    return st.tuples(pairs, spaces).map(lambda parts: "{" + f",{parts[1]}".join(parts[0]) + "}")


values = st.recursive(
    numbers | quoted | st.sampled_from(["true", "null", "nul"]),
    lambda inner: objects(inner) | st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
    max_leaves=8,
)
damage = st.one_of(st.none(), st.tuples(st.floats(0, 1), st.binary(max_size=2)))


@settings(max_examples=250, deadline=None)
@given(objects(values), spaces, st.sampled_from([0, 0, 0, 99, 100, 101, 2000]), damage)
def test_the_quick_reader_gives_what_the_strict_one_does(
    text: str, space: str, depth: int, harm: tuple[float, bytes] | None
) -> None:
    raw = (space + '{"a":' * depth + text + "}" * depth).encode()
    if harm is not None:
        place = int(harm[0] * len(raw))
        raw = raw[:place] + harm[1] + raw[place + 1 :]
    quick, strict = LineParser().parse(3, raw), LineParser().parse_strictly(3, raw)
    assert repr(quick) == repr(strict)  # tells 1 from 1.0 and 0.0 from -0.0
    if isinstance(quick, Line):
        assert repr(json.loads(content_of(quick.record))) == repr(quick.record)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_one_line_to_both_readers(raw: bytes) -> None:
    assert repr(LineParser().parse(1, raw)) == repr(LineParser().parse_strictly(1, raw))


@pytest.mark.parametrize(
    "record",
    [{"id": "\ud83d"}, {"id": "a\udc00b\x7f\u2028", "n": 1 << 70, "f": 1e-7}, {"id": ["\ud800", {"\udfff": None}]}],
)
def test_an_id_of_half_a_pair_is_written_escaped(record: dict) -> None:
    written = dump_line(record)
    assert written.isascii() and json.loads(written) == record and len(written.splitlines()) == 1


def test_records_are_written_without_spaces_and_numbers_keep_their_value() -> None:
    record = {"id": 1 << 70, "f": [0.1, -0.0, 1e16, 1e-7, 5e-324, 1.7976931348623157e308], "t": "é\x00\x1f"}
    written = dump_line(record)
    assert written.startswith(b'{"id":1180591620717411303424,"f":[0.1,-0.0,') and b" " not in written
    assert repr(json.loads(written)) == repr(record)
