"""One frame of `stepwire top` as lines that fit the terminal. Pure: a state and a size in, lines out.

Colours are of the 16 that every terminal has, chosen by its owner for his background; whatever a colour says, a
character or a word says too. Words have no colour, and blue is the bright one: old palettes make cyan words unreadable
on white and plain blue on black. The map's characters grow denser with what a block holds: free, cached, owned, shared.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from rich.text import Text

from protos.stepwire.admin.v1 import admin_pb2 as pb
from scheduler_svc.client.top_rates import Rates
from scheduler_svc.core.survey import CACHED, FREE, OWNED, grouped

MIN_WIDTH, MIN_HEIGHT = 72, 20
LABEL = 10
SPARKS = "▁▂▃▄▅▆▇█"
FILLED, EMPTY = "━", "╌"
# Character and style of a block's state.
MAP = {"free": ("·", "dim"), "cached": ("░", "bright_blue"), "owned": ("▒", "green"), "shared": ("█", "magenta")}
PARTS = (("plan", "▓", "magenta"), ("commit", "▒", "cyan"), ("wire", "░", "bright_blue"), ("device", "█", "green"))
HEADING = "bold"


@dataclass(slots=True)
class State:
    """What a frame is drawn from."""

    address: str
    snapshot: pb.Snapshot | None = None
    rates: Rates = field(default_factory=Rates)
    points: list[float] = field(default_factory=list)
    model: str = ""
    problem: str = ""
    paused: bool = False
    chosen: int = 0  # among the rows
    story_of: str = ""
    story: list[str] = field(default_factory=list)
    interactive: bool = True

    @property
    def row_ids(self) -> list[str]:
        if self.snapshot is None:
            return []
        return [*self.snapshot.running.request_ids, *self.snapshot.waiting.request_ids]


def draw(state: State, width: int, height: int) -> list[Text]:
    """Exactly `height` lines, none wider than `width`."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return _padded([Text(f"top needs {MIN_WIDTH}x{MIN_HEIGHT}, this is {width}x{height}"[:width])], height)
    lines = [_title(state, width)]
    if state.snapshot is None:
        lines += [Text(), Text(_short(state.problem or "waiting for a first answer", width - 1))]
        return [*_padded(lines, height - 1), _keys(state, width)]
    snapshot = state.snapshot
    tenants = list(_tenants(snapshot, width))
    lines += [_tokens(state, width), _steps(state.rates, width), *_latencies(state, snapshot, width), Text()]
    free = height - len(lines) - len(tenants) - 5  # the map's heading and sharers, the rows' headings, the keys
    map_height = max(3, min(free * 2 // 5, -(-len(snapshot.blocks.cells) // (width - 2))))
    lines += _blocks(snapshot, width, map_height)
    lines += _rows(state, snapshot, width, height - len(lines) - len(tenants) - 1)
    return [*_padded(lines + tenants, height - 1), _keys(state, width)]


# ---- the head --------------------------------------------------------------------------------------------------


def _title(state: State, width: int) -> Text:
    snapshot = state.snapshot
    word, style = _condition(state)
    right = ""
    if snapshot is not None:
        right = f"epoch {snapshot.epoch}  up {_duration(snapshot.uptime_ms / 1000)}"
    left = Text.assemble(("stepwire top ", HEADING), (f" {word} ", style), "  ")
    named = f"{state.model}  {snapshot.dtype} on {snapshot.device or '?'}" if snapshot is not None else state.address
    left.append(_short(named, width - left.cell_len - len(right) - 2))
    return _spread(left, Text(right), width)


def _condition(state: State) -> tuple[str, str]:
    snapshot = state.snapshot
    if state.problem or snapshot is None:
        return ("AWAY" if state.problem else "CONNECTING"), "bold reverse red"
    if state.paused:
        return "PAUSED", "bold reverse"
    if not snapshot.executor_ready:
        return "NO EXECUTOR", "bold reverse red"
    if snapshot.stalled:
        return "STALLED", "bold reverse red"
    if snapshot.draining:
        return "DRAINING", "bold reverse"
    return "SERVING", "bold reverse green"


def _tokens(state: State, width: int) -> Text:
    rates = state.rates
    line = _labelled("tokens/s", f"{rates.generated:,.0f} drawn")
    tail = [Text(f"  prompts {rates.computed:,.0f} computed"), Text(f", {rates.cached:,.0f} from cache")]
    room = min(width - line.cell_len - sum(words.cell_len for words in tail) - 3, 60)
    if room >= 8:
        line.append("  ")
        line.append(sparkline(state.points[-room:]).rjust(room), "green")
    return _as_fits(line, tail, width)


def _steps(rates: Rates, width: int) -> Text:
    if rates.step_ms is None:
        return _labelled(
            "step", f"no step ended in the last {_duration(rates.seconds)}" if rates.seconds else "not seen yet"
        )
    parts = {"plan": rates.plan_ms, "commit": rates.commit_ms, "wire": rates.wire_ms, "device": rates.device_ms}
    line = _labelled("step", f"{_ms(rates.step_ms)} ms  {rates.steps:,.0f}/s")
    words = [Text.assemble("  ", (glyph, style), f" {name} {_ms(parts[name])}") for name, glyph, style in PARTS]
    room = min(width - line.cell_len - sum(word.cell_len for word in words) - 3, 60)
    if room >= 8:
        line.append("  ")
        line.append_text(_shares([(parts[name], glyph, style) for name, glyph, style in PARTS], room))
    return _as_fits(line, words, width)


def _latencies(state: State, snapshot: pb.Snapshot, width: int) -> Iterator[Text]:
    def words(values: tuple[float, float] | None) -> str:
        return f"p50 {_ms(values[0])}  p99 {_ms(values[1])} ms" if values else "none"

    rates, totals = state.rates, snapshot.totals
    line = _labelled("latency", f"TTFT {words(rates.ttft_ms)}")
    yield _as_fits(
        line, [Text(f"    ITL {words(rates.itl_ms)}"), Text(f"    last {_duration(rates.latency_seconds)}")], width
    )
    num_executors = len(snapshot.executors)
    num_serving = sum(executor.serving for executor in snapshot.executors)
    serving = f"  executors {num_serving}" + (f" of {num_executors}" if num_executors > num_serving else "")
    line = _labelled("so far", f"{totals.preemptions:,} preempted, {totals.recomputed_tokens:,} tokens recomputed")
    yield _as_fits(line, [Text(f"    frontends {len(snapshot.frontends)}"), Text(serving)], width)


# ---- blocks ----------------------------------------------------------------------------------------------------


def _blocks(snapshot: pb.Snapshot, width: int, height: int) -> list[Text]:
    """The map in at most `height` lines, between its heading and the sharers."""
    blocks = snapshot.blocks
    numbers = {"shared": blocks.shared, "owned": blocks.owned - blocks.shared, "cached": blocks.cached}
    numbers["free"] = blocks.free
    heading = Text.assemble(("KV blocks ", HEADING), f"{blocks.total:,} x {blocks.block_size}  ")
    words = [
        Text.assemble((f" {MAP[name][0]} ", MAP[name][1]), f"{name} {count:,} ") for name, count in numbers.items()
    ]
    cells = grouped(np.frombuffer(blocks.cells, np.uint8), (width - 2) * height)
    lines = [_as_fits(heading, words, width)]
    for start in range(0, len(cells), width - 2):
        line = Text(" ")
        for name, run in _runs(cells[start : start + width - 2]):
            glyph, style = MAP[name]
            line.append(glyph * run, style)
        lines.append(line)
    per_cell = -(-blocks.total // max(1, len(cells)))
    return [*lines, _sharers(snapshot, width, per_cell), Text()]


def _runs(cells: np.ndarray) -> Iterator[tuple[str, int]]:
    kinds = np.minimum(cells, OWNED + 1)
    edges = np.flatnonzero(np.diff(kinds)) + 1
    for part in np.split(kinds, edges):
        if len(part):
            yield {FREE: "free", CACHED: "cached", OWNED: "owned"}.get(int(part[0]), "shared"), len(part)


def _sharers(snapshot: pb.Snapshot, width: int, per_cell: int) -> Text:
    line = Text(f" a character is {per_cell} blocks; " if per_cell > 1 else " ")
    line.append("most shared: " if snapshot.shared else "no prefix is shared by running sequences")
    for i, one in enumerate(snapshot.shared):
        words = f"{'; ' if i else ''}{one.num_blocks} blocks by {one.num_sequences} ({_short(one.request_id, 12)})"
        if line.cell_len + len(words) > width - 1:
            break
        line.append(words)
    return line


# ---- rows ------------------------------------------------------------------------------------------------------


def _rows(state: State, snapshot: pb.Snapshot, width: int, height: int) -> list[Text]:
    """At most `height` lines. Those that wait get a third of them at most, a story a half."""
    story = _story(state, width, height // 2) if state.story_of else []
    room = height - len(story) - 2
    num_running, num_waiting = len(snapshot.running.request_ids), len(snapshot.waiting.request_ids)
    for_waiting = min(num_waiting, max(room // 3, room - num_running))
    for_running = min(num_running, room - for_waiting)
    # The chosen one stays in sight.
    first = max(0, min(state.chosen - for_running + 1, num_running - for_running)) if state.interactive else 0
    named, tenant, bar = widths = _widths(width)
    counts = f"running {snapshot.num_running} of {snapshot.max_num_seqs}  waiting {snapshot.num_waiting}"
    # Rows that are not in sight; also those that the snapshot leaves out.
    hidden = {
        "running": snapshot.num_running - for_running if for_running < num_running else 0,
        "waiting": snapshot.num_waiting - for_waiting if for_waiting < num_waiting else 0,
    }
    beyond = " and ".join(f"{count} {what}" for what, count in hidden.items() if count > 0)
    lines = [_as_fits(Text(counts, HEADING), [Text(f"   not shown: {beyond}")] if beyond else [], width)]
    heading = f"   {'request':{named}} {'tenant':{tenant}} {'':8}{'':{bar}} {'tokens':>11} {'shared':>6} {'age':>6}"
    lines.append(Text(heading, HEADING))
    running, waiting = snapshot.running, snapshot.waiting
    lines += [_row(running, i, state, i, widths, waits=False) for i in range(first, first + for_running)]
    lines += [_row(waiting, i, state, num_running + i, widths, waits=True) for i in range(for_waiting)]
    if not num_running + num_waiting:
        lines.append(Text("   nobody asks for anything", "dim"))
    return _padded(lines, height - len(story)) + story


def _widths(width: int) -> tuple[int, int, int]:
    """Of the columns that can give: id, tenant, bar. The others need 40 characters."""
    tenant = 8 if width < 100 else 16
    named = max(15, min(36, width - 60 - tenant))
    return named, tenant, max(8, min(60, width - named - tenant - 40))


def _row(columns: pb.Sequences, i: int, state: State, place: int, widths: tuple[int, int, int], *, waits: bool) -> Text:
    named, tenant, bar = widths
    num_prompt, num_output = columns.num_prompt_tokens[i], columns.num_output_tokens[i]
    computed, most = columns.num_computed_tokens[i], columns.max_tokens[i]
    if waits:
        doing, done, whole = ("again" if columns.num_preemptions[i] else "waits"), num_output, max(1, most)
    elif not num_output:
        doing, done, whole = "prefill", min(computed, num_prompt), num_prompt
    else:
        doing, done, whole = "decode", num_output, max(1, most)
    filled = min(bar, round(bar * done / max(1, whole)))
    chosen = state.interactive and place == state.chosen
    line = Text(" > " if chosen else "   ", style="bold" if chosen else "")
    line.append(
        f"{_short(columns.request_ids[i], named):{named}} {_short(columns.tenants[i] or '-', tenant):{tenant}} "
    )
    line.append(f"{doing:8}")
    line.append(FILLED * filled, "green" if doing == "decode" else "cyan")
    line.append(EMPTY * (bar - filled), "dim")
    line.append(
        f" {f'{done}/{whole}':>11} {columns.num_shared_tokens[i] or '-':>6} {_duration(columns.age_ms[i] / 1000):>6}"
    )
    return line


def _story(state: State, width: int, height: int) -> list[Text]:
    lines = [Text(f"story of {_short(state.story_of, width - 10)}", HEADING)]
    told = state.story or ["nothing is known of it"]
    return lines + [Text(" " + _short(line, width - 2)) for line in told[-(height - 1) :]]


def _tenants(snapshot: pb.Snapshot, width: int) -> Iterator[Text]:
    """Shares of the tables' blocks, when there is more than one tenant."""
    if len(snapshot.tenants) < 2:
        return
    whole = sum(tenant.num_blocks for tenant in snapshot.tenants) or 1
    line = Text.assemble(("tenants", HEADING))
    for tenant in snapshot.tenants:
        share = tenant.num_blocks / whole
        words = f"  {_short(tenant.name or '-', 16)} {'▪' * round(8 * share)}{100 * share:.0f} % of blocks,"
        words += f" {tenant.num_running}+{tenant.num_waiting}"
        if line.cell_len + len(words) > width:
            break
        line.append(words)
    yield line


def _keys(state: State, width: int) -> Text:
    if not state.interactive:
        return Text(_short(state.address, width), "dim")
    keys = Text()
    for key, does in (("q", "quit"), ("up/down", "choose"), ("enter", "its story"), ("p", "pause")):
        keys.append(f" {key} ", "reverse")
        keys.append(f" {does}  ")
    return _spread(keys, Text(_short(state.address, max(0, width - keys.cell_len - 1)), "dim"), width)


# ---- small things ----------------------------------------------------------------------------------------------


def sparkline(points: Iterable[float]) -> str:
    values = list(points)
    highest = max(values, default=0.0)
    if highest <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(7, int(8 * value / highest))] for value in values)


def _shares(parts: list[tuple[float, str, str]], width: int) -> Text:
    """A bar of `width`, split by value; whatever is there at all gets a character."""
    whole = sum(value for value, _, _ in parts) or 1.0
    sizes = [max(1, round(width * value / whole)) if value > 0 else 0 for value, _, _ in parts]
    sizes[sizes.index(max(sizes))] += width - sum(sizes)
    bar = Text()
    for (_, glyph, style), size in zip(parts, sizes, strict=True):
        bar.append(glyph * size, style)
    return bar


def _labelled(label: str, text: str) -> Text:
    return Text.assemble((f"{label:{LABEL}}", HEADING), text)


def _as_fits(line: Text, words: Iterable[Text], width: int) -> Text:
    """`line`, and as many of the words, in order, as there is room for: half a figure would be a wrong one."""
    for word in words:
        if line.cell_len + word.cell_len > width:
            break
        line.append_text(word)
    return line


def _spread(left: Text, right: Text, width: int) -> Text:
    """`right` ends at the edge, if there is room for it."""
    gap = width - left.cell_len - right.cell_len
    if gap < 1:
        return left
    return left.append(" " * gap).append_text(right)


def _padded(lines: list[Text], height: int) -> list[Text]:
    return lines[:height] + [Text() for _ in range(height - len(lines))]


def _short(text: str, width: int) -> str:
    """Ids differ at both ends: the middle goes. What a client named is not trusted with the terminal."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    if len(plain) <= width:
        return plain
    head = (width - 1) // 2
    return plain[:head] + "…" + plain[len(plain) - (width - 1 - head) :] if width > 1 else plain[:width]


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes = int(seconds // 60)
    return f"{minutes}m" if minutes < 120 else f"{minutes // 60}h" if minutes < 2880 else f"{minutes // 1440}d"
