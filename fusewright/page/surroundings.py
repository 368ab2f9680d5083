"""Where and how the records were measured: machine, versions, flags, clocks, rates, command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusewright.bench.record import ClockFacts, Clocks, Environment, Rates, Record, Settings
from fusewright.page.figures import bytes_text, rate_text, time_text
from fusewright.page.markup import Html, joined, table, tag
from fusewright.page.standing import precision_text


def surroundings(records: Sequence[Record]) -> Html:
    """Each environment once. If there are several, with the number of problems that ran in it."""
    groups: dict[str, list[Record]] = {}
    for each in records:
        if each.environment and each.status == "ok":
            # With one process per problem, the commands differ.
            command = "" if len(records) > 1 else "same"
            same = replace(each.environment, clocks=(), other_cores=0.0, command=command)
            groups.setdefault(repr((same, _measured_how(each))), []).append(each)
    return joined(_one(each, several=len(groups) > 1) for each in groups.values())


def _measured_how(record: Record) -> tuple[Settings, str]:
    return record.settings, record.clock.kind if record.clock else ""


def _one(records: Sequence[Record], *, several: bool) -> Html:
    first = records[0]
    environment = first.environment
    assert environment is not None  # `surroundings` groups only records with an environment.
    commands = dict.fromkeys(
        each.environment.command
        for each in records
        if each.environment and each.environment.command
    )
    parts = [tag("h4", f"{len(records)} problems measured like this")] if several else []
    parts += [tag("pre", tag("code", each), tabindex=0) for each in list(commands)[:1]]
    if len(commands) > 1:
        words = f"and {len(commands) - 1} more, one process for each problem"
        rest = tag("pre", tag("code", "\n".join(list(commands)[1:])), tabindex=0)
        parts.append(tag("details", tag("summary", words), rest))
    facts = [*_facts(environment), *_measuring(first)]
    parts.append(_list(facts))
    environments = [each.environment for each in records if each.environment]
    busiest = max(environments, key=lambda each: each.other_cores)
    if busiest.busy:
        parts.append(tag("p", f"{busiest.busy[0].upper()}{busiest.busy[1:]}."))
    if len(records) == 1 and environment.clocks:
        parts.append(_clocks(environment.clocks))
    elif environment.clocks:
        parts.append(_range([each.environment.clocks for each in records if each.environment]))
    return joined(parts)


def _list(facts: Sequence[tuple[str, str]]) -> Html:
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value),
        class_="facts",
    )


def _facts(environment: Environment) -> Iterator[tuple[str, str]]:
    yield "device", environment.device
    yield "cpu", environment.cpu
    yield "driver", environment.driver
    yield "fusewright commit", environment.commit
    yield from environment.versions.items()
    yield "flags", _pairs(environment.flags)
    yield "variables", _pairs(environment.variables)


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _measuring(record: Record) -> Iterator[tuple[str, str]]:
    settings = record.settings
    yield "started", record.started_at
    yield "model mode", settings.mode
    if settings.quick:
        yield "quick", "fewer repeats: a first impression, not a result to publish"
    if record.clock:
        yield from _clock(record.clock)
    yield "seed, input sets", f"{settings.seed}, {settings.input_sets}"
    if record.rates:
        yield "measured ceilings", _ceilings(record.rates)


def _clock(clock: ClockFacts) -> Iterator[tuple[str, str]]:
    flushed = f"{bytes_text(clock.flush_bytes)} written before each repeat"
    yield "clock", f"{clock.kind}; an empty synchronization takes {time_text(clock.idle_gap_us)}"
    yield "cache", f"{bytes_text(clock.cache_bytes)}, {flushed}"


def _ceilings(rates: Rates) -> str:
    matmuls = (f"{precision_text(k)} {rate_text(v, 'op')}" for k, v in rates.products.items())
    return ", ".join([f"copy {rate_text(rates.copy_bytes_per_s, 'B')}", *matmuls])


def _clocks(clocks: Sequence[Clocks]) -> Html:
    heads = ("after", "SM clock", "memory clock", "power", "temperature")
    rows = [
        [
            each.when,
            f"{each.sm_mhz:.0f} MHz",
            f"{each.memory_mhz:.0f} MHz",
            f"{each.power_w:.0f} W",
            f"{each.temperature_c:.0f} °C",
        ]
        for each in clocks
    ]
    return table(heads, rows, caption="GPU clocks during the run", words=len(heads))


def _range(seen: Sequence[Sequence[Clocks]]) -> Html:
    speeds = [each.sm_mhz for clocks in seen for each in clocks]
    if not speeds:
        return Html("")
    return tag("p", f"SM clocks: {min(speeds):.0f} to {max(speeds):.0f} MHz.")
