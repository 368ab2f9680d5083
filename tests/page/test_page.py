"""The report page: complete, self-contained, and safe whatever the records hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fusewright.bench.record import CandidateFacts, Floor, PlanStep, Record
from fusewright.bench.storage import RecordError, read_records, write
from fusewright.page import document
from fusewright.page.accuracy import Spot, labelled_spots, power_text, ring_size, round_between
from fusewright.page.bars import ticks_between
from fusewright.page.document import charts_png, render
from fusewright.page.figures import ratio_text, shortened, time_text
from fusewright.page.markup import Html, tag
from fusewright.page.standing import level, sentence
from tests.support.page_samples import (
    ENTRIES,
    HOSTILE,
    Entry,
    failed,
    folder,
    record,
    scaled,
    with_failures,
)

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Holds that elements close in order; collects texts, ids and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts = 0

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += name == "script"
        self.attributes += [(name, key, value or "") for key, value in attributes]
        self.ids += [value or "" for key, value in attributes if key == "id"]
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(name, attributes)
        if name not in VOID:
            self.open.pop()

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(text)

    @property
    def words(self) -> str:
        return "\n".join([*self.text, *(value for _, _, value in self.attributes)])


def parsed(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def single() -> str:
    return render([with_failures()])


@pytest.fixture(scope="module")
def many() -> str:
    return render(folder(3))


def test_one_problem_is_shown_in_full(single: str) -> None:
    words = parsed(single).words
    whole = with_failures()
    for facts in whole.candidates:
        assert facts.name in words
    for found in whole.passes:
        for result in found.results:
            assert result.note in words
            for check in result.checks:
                assert check.name in words
            for step in result.steps:
                assert step.step in words
                assert all(kernel in words for kernel in step.kernels)
    for graph in whole.plan:
        for step in graph.steps:
            assert step.reason in words
    assert whole.environment is not None
    assert whole.environment.command in words
    assert whole.environment.commit in words


def test_the_verdict_is_one_sentence(single: str) -> None:
    expected = "ours: 1.37× faster than the best baseline (max-autotune) in training"
    assert expected in parsed(single).words
    assert sentence(record(), "ours").endswith("all checks ok in fp32.")


def test_every_mark_says_what_it_shows(single: str) -> None:
    marks = len(re.findall(r'class="mark"', single))
    assert marks == len(re.findall(r'class="mark"[^>]*><title>[^<]+</title>', single)) > 40
    assert "ours against compile\n1.42×, 95 % interval" in single
    assert "share of the roof" in single


def test_ids_are_unique_and_links_have_targets(single: str, many: str) -> None:
    for text in (single, many):
        reader = parsed(text)
        assert len(reader.ids) == len(set(reader.ids))
        targets = {value for _, key, value in reader.attributes if key == "href"}
        assert all(each.startswith("#") and each[1:] in reader.ids for each in targets)
        used = set(re.findall(r"url\(#([^)]+)\)", text))
        assert used <= set(reader.ids)


def test_nothing_is_fetched(single: str, many: str) -> None:
    for text in (single, many):
        for name, key, value in parsed(text).attributes:
            if key in ("src", "href", "xlink:href", "action", "srcset"):
                assert value.startswith("#"), (name, key, value)
        assert "://" not in text
        assert "@import" not in text
        assert "default-src 'none'" in text


def test_all_colours_are_variables(single: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", single, re.DOTALL))
    assert drawn
    assert not re.findall(r"#[0-9a-f]{6}\b", re.sub(r'(href|id|url)[="(#]+[^")]*', "", drawn))


def hostile_record() -> Record:
    entries = {**ENTRIES, HOSTILE: Entry("foreign", {"forward": 99.0, "train": 300.0})}
    made = record(HOSTILE, entries, ("train",))
    step = PlanStep(HOSTILE, HOSTILE, (HOSTILE,), (HOSTILE,), (HOSTILE,), 1, 1, HOSTILE)
    assert made.environment is not None
    return replace(
        made,
        environment=replace(made.environment, command=HOSTILE, flags={HOSTILE: HOSTILE}),
        plan=(replace(made.plan[0], steps=(step,), graph=HOSTILE),),
        passes=tuple(
            replace(
                each,
                results=tuple(
                    replace(
                        result,
                        note=HOSTILE,
                        checks=tuple(replace(c, name=HOSTILE, note=HOSTILE) for c in result.checks),
                    )
                    for result in each.results
                ),
            )
            for each in made.passes
        ),
    )


@pytest.mark.parametrize("count", [1, 2])
def test_names_from_outside_are_text(count: int) -> None:
    bad = failed(HOSTILE, "crashed", f"</pre>{HOSTILE}")
    text = render([hostile_record(), bad][:count])
    reader = parsed(text)
    assert reader.scripts == 1
    assert HOSTILE not in text
    assert HOSTILE in reader.words
    assert not [key for _, key, _ in reader.attributes if key.startswith("on")]


@pytest.mark.parametrize(
    "name", ["a$b$c_{x}", "\x00\x1b[31mred", "漢字 ünïcode", "x" * 300, "", "'\"`&amp;", "#fe0100"]
)
def test_odd_names_do_not_break_the_page(name: str) -> None:
    entries = {**scaled(1.2), name: Entry("foreign", {"forward": 99.0, "train": 300.0})}
    reader = parsed(render([record(name, entries, ("train",))]))
    shown = re.sub("[\x00-\x1f]", "\ufffd", name)
    assert shown in reader.words


def test_same_records_same_text(single: str) -> None:
    assert render([with_failures()]) == single


def partial_records() -> Iterator[Record]:
    whole = record()
    first = whole.passes[0]
    yield failed("nothing", "ok", "")
    yield failed("lost", "timeout", "stopped after 600 s")
    yield replace(whole, passes=())
    yield replace(whole, candidates=())
    yield replace(whole, rates=None, clock=None, environment=None, plan=())
    yield replace(whole, passes=(replace(first, floor=None),))
    yield replace(whole, passes=(replace(first, floor=Floor(0, 0, {}, "no floor: why")),))
    yield replace(whole, passes=(replace(first, floor=Floor(1000, 0, {"memory": 1.0})),))
    yield replace(whole, passes=(replace(first, results=()),))
    bare = tuple(replace(each, timing=None, ratios=(), checks=()) for each in first.results)
    yield replace(whole, passes=(replace(first, results=bare),))
    zero = tuple(
        replace(
            each,
            timing=each.timing and replace(each.timing, median_us=0.0),
            ratios=tuple(replace(ratio, low=0.0, high=math.inf) for ratio in each.ratios),
            checks=tuple(replace(check, error=math.nan) for check in each.checks),
            steps=tuple(
                replace(step, time_us=None, bytes_per_s=None, roof_share=None)
                for step in each.steps
            ),
        )
        for each in first.results
    )
    yield replace(whole, passes=(replace(first, results=zero),))
    yield replace(whole, candidates=(*whole.candidates, CandidateFacts("late", "foreign")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("partial", list(partial_records()))
def test_partial_records_are_shown_as_far_as_they_go(partial: Record) -> None:
    assert partial.problem.name in parsed(render([partial])).words
    assert (
        partial.problem.name in parsed(render([partial, failed("other", "crashed", "why")])).words
    )


def test_no_records_no_crash() -> None:
    assert "No records" in parsed(render([])).words


def test_many_problems_lead_with_trouble(many: str) -> None:
    words = parsed(many).words
    order = ["90_conv3d_softmax", "61_wrong_bias", "62_lower_precision"]
    places = [many.index(f">{name}</a>") for name in order]
    assert places == sorted(places)
    assert places[-1] < many.index("Spread of speedups")
    for each in folder(3):
        assert each.problem.name in words
    for phrase in ("signal 11", "after 600 s", "geometric mean", "faster than 4×"):
        assert phrase in words
    assert "Not counted, and marked below: 1 with a lower precision" in words


def test_a_large_folder_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "WHOLE_BYTES", 100_000)
    records = [record(f"problem {index}", scaled(1.2)) for index in range(20)]
    text = render(records)
    assert len(text.encode()) < 400_000
    assert text.count("left out to save space") == 18


def test_levels_and_verdicts() -> None:
    assert level(record(), "ours") == "good"
    assert level(record(), "gemm_tensor_cores") == "coarse"
    assert level(record(), "gemm_forgets_bias") == "wrong"
    assert level(record(entries=scaled(0.5)), "ours") == "bad"
    assert level(failed("x", "crashed", "why"), "") == "wrong"
    assert "slower than the best baseline" in sentence(record(entries=scaled(0.5)), "ours")
    assert "but in TF32" in sentence(record(), "gemm_tensor_cores")
    even = {**ENTRIES, "ours": Entry("ours", ENTRIES["max-autotune"].times_us)}
    assert level(record(entries=even), "ours") == "even"
    assert "as fast as the best baseline (max-autotune)" in sentence(record(entries=even), "ours")
    fast = {**ENTRIES, "compile": Entry("compile", {"forward": 90.0, "train": 200.0}, "tf32")}
    words = sentence(record(entries=fast), "ours")
    assert "1.37× faster than the best baseline (max-autotune) in training" in words
    assert "(faster, but less precise: compile)" in words


def test_records_come_back_from_files(tmp_path: Path) -> None:
    records = (record("a", scaled(1.2)), failed("b", "crashed", "why"))
    for each in records:
        write(tmp_path / f"{each.problem.name}.json", each)
    assert read_records(tmp_path) == records
    assert read_records(tmp_path / "b.json") == records[1:]
    with pytest.raises(RecordError, match="no such file"):
        read_records(tmp_path / "c.json")


def test_charts_are_written_as_png(tmp_path: Path) -> None:
    one = charts_png([record("a b", passes=("train",))], tmp_path / "one")
    names = ["a-b-speedup-train.png", "a-b-roofline-train.png", "a-b-error-train.png"]
    assert [each.name for each in one] == names
    several = charts_png([record("a", scaled(1.2)), record("b", scaled(0.8))], tmp_path)
    assert [each.name for each in several] == ["spread-forward.png", "spread-train.png"]
    for each in (*one, *several):
        assert each.read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in (tmp_path / "one").iterdir()) == sorted(names)


def test_overlapping_marks_are_all_visible_and_share_a_label() -> None:
    result = record().passes[0].results[0]

    def spot(state: str, x: float, y: float = 0.5) -> Spot:
        return Spot(result, result.checks[0], state, x, y)

    near = [spot("TF32", 0.50), spot("TF32", 0.51), spot("bf16", 0.52), spot("TF32", 0.9)]
    sizes = [ring_size(each, near[place + 1 :]) for place, each in enumerate(near)]
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3]
    assert labelled_spots([*near, spot("fp32", 0.1)]) == [near[0], near[2], near[3]]
    assert labelled_spots([near[0], spot("TF32", 0.51, 0.9)])[1].y == 0.9


def test_a_failed_problem_does_not_count_as_measured_in_another_way() -> None:
    whole = record("a", scaled(1.2))
    bad = replace(failed("b", "crashed", "why"), environment=whole.environment)
    words = parsed(render([whole, bad])).words
    assert "measured ceilings" in words and "problems measured like this" not in words


def test_a_share_above_the_floor_is_explained() -> None:
    whole = record("a", scaled(1.2))
    first = whole.passes[0]
    results = tuple(replace(each, floor_share=2.8) for each in first.results)
    above = replace(whole, passes=(replace(first, results=results),))
    why = "bove 100 % of the fp32 floor: tensor cores with fp32's accuracy"
    for records in ([above], [above, whole]):
        assert why in parsed(render(records)).words
    assert why not in parsed(render([whole])).words


def test_markup_escapes_all_but_html() -> None:
    assert tag("p", "<b>", Html("<i></i>"), class_='"') == '<p class="&quot;">&lt;b&gt;<i></i></p>'
    assert tag("td", "x", data_tip=None, hidden=True) == "<td hidden>x</td>"


def test_numbers_ticks_and_units_as_text() -> None:
    assert [time_text(each) for each in (0.5, 12.34, 412.0, 1100.0, 2.5e6, None)] == [
        "0.500 µs",
        "12.3 µs",
        "412 µs",
        "1.10 ms",
        "2.50 s",
        "–",
    ]
    assert [ratio_text(each) for each in (0.9, 1.364, 12.34, math.nan)] == [
        "0.90×",
        "1.36×",
        "12.3×",
        "–",
    ]
    assert shortened("abcdefghij", 7) == "abcd…ij"
    assert ticks_between(1.0, 1.4) == [1.0, 1.1, 1.2, 1.3, 1.4]
    assert ticks_between(0.5, 4.0) == [0.5, 1 / 1.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert ticks_between(0.1, 1000.0)[-1] <= 1000.0
    assert round_between(120.0, 460.0) == [120.0, 150.0, 200.0, 250.0, 300.0, 400.0]
    assert round_between(1010.0, 1330.0) == [1100.0, 1200.0, 1300.0]
    assert power_text(1e-7) == "10⁻⁷"
