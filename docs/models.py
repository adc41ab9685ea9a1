"""Which kernels serve each model file of the installed mlx-lm: the tables of docs/models, a page for each kind.

Each file's model is built small and with random weights of 4 bits. It runs under the patch, and converted: a first
prompt, a second one, then a token, whose launches are those of an Apple GPU in the simulator.

python docs/models.py            prints them
python docs/models.py --write    writes them into the pages
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_files import LEFT_OUT, SIMULATED, build, files

from mlx_mittens.prediction import mlx_graph, mlx_launches

PAGES = Path(__file__).resolve().parent / "models"
# The kinds of layers of a file's model, by the kernels that serve it; the first that is found.
KINDS = {
    "recurrent": re.compile(r"\b(gated_delta_\w+|ssm_\w+|short_conv_\w+)\b"),
    "mixtures": re.compile(r"\b(gather_\w+|route_top_k)\b"),
    "dense": re.compile(""),
}
PATTERN = re.compile(r"(?<=<!-- models: begin -->\n).*?(?=<!-- models: end -->)", re.S)

GPU = "m2-max"  # whose launches a token has
_OWN_KERNEL = "metal_kernel"  # a kernel that a model file brings
COPY = "copy"  # of an argument that a kernel cannot read as it lies


def of_mx(model: Any, caches: Any) -> collections.Counter[str]:
    """Launches of mx's for a token: on Metal a composed function is one, and views are none.

    It has what `mx.compile` fuses. Nothing is evaluated: a CPU would compile that as C++.
    """
    import mlx.core as mx

    found: collections.Counter[str] = collections.Counter()
    with mlx_graph.Recorder() as recorder:
        recorder.record(model(mx.array([[0]]), cache=caches), [one.state for one in caches])
    for operations, _ in recorder.evaluations:
        for operation in operations:
            if operation.name == "MittensMetalKernel":
                found[_OWN_KERNEL] += 1
            elif not operation.is_ours:
                planned = mlx_launches.plan(operation, operations)
                name = operation.name.removeprefix("mx.fast.")
                found[name] += len(planned) if isinstance(planned, tuple) else 1
    return +found


HOW = ("patched", "converted")
# Each prompt is longer than the windows. The first token after one may make room in the caches.
STEPS = (("first prompt", 9), ("prompt", 11), ("", 1), ("token", 1))


def measure(name: str) -> dict[str, Any]:
    """The kernels and operations of a model file's model, patched and converted, for prompts and for a token.

    Of each: launches of our kernels by op, operations of mx's for a token, and calls that went to mx with the reason.
    """
    import mlx_mittens as mm

    found: dict[str, Any] = {}
    for how in HOW:
        model = build(name)
        found["layers"] = len(model.layers)
        if how == "patched":
            with mm.patched():
                found[how] = _run(name, model)
        else:
            found[how] = _run(name, mm.nn.convert(model))
    return found


def called(name: str, model: Any, inputs: Any, caches: Any) -> Any:
    """Logits that are still to be computed: in the simulator run the kernels called in it, and ops evaluated in it."""
    import mlx_mittens as mm

    with mm.simulator.enabled(watch=False) if name in SIMULATED else contextlib.nullcontext():
        return model(inputs, cache=caches)


def token(model: Any, caches: Any) -> dict[str, dict[str, Any]]:
    """What a token launches on an Apple GPU: of ours by op, of mx's by operation, and why calls went to mx."""
    import mlx.core as mx

    import mlx_mittens as mm

    with mm.simulator.enabled(watch=False, gpu=GPU, pretend_metal=True):
        theirs = of_mx(model, copy.deepcopy(caches))
        mm.stats(reset=True)
        before = mm.simulator.launched()
        mx.disable_compile()
        try:
            mx.eval(model(mx.array([[0]]), cache=caches), [one.state for one in caches])
        finally:
            mx.enable_compile()
    stats = mm.stats(reset=True)
    ours = {op: sum(one["kernels"].values()) for op, one in sorted(stats.items()) if one["kernels"]}
    copies = mm.simulator.launched() - before - sum(ours.values()) - theirs[_OWN_KERNEL]
    if copies:
        ours[COPY] = copies
    return {
        "ours": ours,
        "mx": dict(sorted((+theirs).items())),
        "why": {op: sorted(one["mx"]) for op, one in sorted(stats.items()) if one["mx"]},
    }


def _run(name: str, model: Any) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.models import cache

    import mlx_mittens as mm

    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    try:  # frequencies and weights of norms are computed once
        mx.eval(called(name, model, mx.array([[0, 1]]), cache.make_prompt_cache(model)))
    finally:
        mx.enable_compile()
    caches = cache.make_prompt_cache(model)
    found: dict[str, Any] = {}

    for kind, tokens in STEPS:
        inputs = mx.array([list(range(tokens))])
        if kind == "token":
            found[kind] = token(model, caches)
            continue
        mm.stats(reset=True)
        mx.disable_compile()  # on a CPU that would compile C++
        try:
            mx.eval(called(name, model, inputs, caches), [one.state for one in caches])
        finally:
            mx.enable_compile()
        stats = mm.stats(reset=True)
        if kind:
            found[kind] = {
                "ours": {op: sum(one["kernels"].values()) for op, one in sorted(stats.items()) if one["kernels"]}
            }
    return found


def measured(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The same of several files; of one that fails, why."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            results[name] = {"failed": LEFT_OUT[name]} if name in LEFT_OUT else measure(name)
        except (Exception, SystemExit) as error:  # one asks for a package and exits
            results[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:90]}
    return results


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{op} {n}" for op, n in counts.items())


def _mx_text(counts: dict[str, int]) -> str:
    """Operations of mx's, the most frequent first; fusions of mx.compile have the names of their parts."""
    fused = {op: n for op, n in counts.items() if op.startswith("Compiled")}
    plain = sorted(((op, n) for op, n in counts.items() if op not in fused), key=lambda one: (-one[1], one[0]))
    parts = [f"fused {sum(fused.values())}"] if fused else []
    return ", ".join(parts + [f"{op} {n}" for op, n in plain])


# In the place of a cell that says the same.
AS_FIRST, AS_PATCHED = "as the first", "as patched"
COLUMNS = (
    *("file", "first prompt", "prompt", "token", "converted: first prompt", "converted: prompt", "converted: token"),
    *("launches a layer", "converted", "of mx, a token", "converted", "why"),
)


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if "failed" in found:
        why = f"not measured: {found['failed'].replace('|', '/')}"
        return f"| {' | '.join([name, *[''] * (len(COLUMNS) - 2), why])} |"
    kinds = [kind for kind, _ in STEPS if kind]
    ours = {how: [_counts(found[how][kind]["ours"]) for kind in kinds] for how in HOW}
    texts = {how: _mx_text(found[how]["token"]["mx"]) for how in HOW}
    converted = [AS_PATCHED if a == b else a for a, b in zip(ours["converted"], ours["patched"], strict=True)]
    for cells in (ours["patched"], converted):
        if cells[1] == cells[0] and cells[0] != AS_PATCHED:
            cells[1] = AS_FIRST
    launches = []
    for how in HOW:
        token = found[how]["token"]
        launches.append(f"{(sum(token['ours'].values()) + sum(token['mx'].values())) / found['layers']:.1f}")
    reasons = {op: why for how in HOW for op, why in found[how]["token"]["why"].items()}
    cells = [
        *(name, *ours["patched"], *converted, *launches, texts["patched"]),
        AS_PATCHED if texts["converted"] == texts["patched"] else texts["converted"],
        "; ".join(f"{op}: {', '.join(reasons[op])}" for op in sorted(reasons)),
    ]
    return f"| {' | '.join(cells)} |"


def made_with() -> str:
    """The line that names the versions that the table depends on."""
    return f"mlx-lm {importlib.metadata.version('mlx-lm')}, mlx {importlib.metadata.version('mlx')}."


def kind_of(line: str) -> str:
    """The page of a row."""
    return next(kind for kind, pattern in KINDS.items() if pattern.search(line))


def table(results: dict[str, dict[str, Any]], kind: str) -> str:
    """The table of a page."""
    lines = ["--:" if name in ("launches a layer", "converted") else "---" for name in COLUMNS]
    lines[COLUMNS.index("of mx, a token") + 1] = "---"
    heading = f"| {' | '.join(COLUMNS)} |\n|{'|'.join(lines)}|\n"
    rows = [row(name, results[name]) for name in sorted(results)]
    return f"{made_with()}\n\n{heading}" + "".join(f"{line}\n" for line in rows if kind_of(line) == kind)


def in_docs() -> str:
    """The tables as the pages have them."""
    texts = [(PAGES / f"{kind}.md").read_text() for kind in KINDS]
    return "".join(match[0] for text in texts if (match := PATTERN.search(text)))


def rows_of_pages() -> dict[str, dict[str, dict[str, str]]]:
    """The cells of each file's row, patched and converted, but for unmeasured ones."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in in_docs().splitlines()]
    rows = {}
    for line in lines:
        if len(line) < len(COLUMNS) or line[0] in ("file", "---") or not line[7]:
            continue
        patched = [*line[1:4], line[7], line[9]]
        patched[1] = patched[0] if patched[1] == AS_FIRST else patched[1]
        converted = [*line[4:7], line[8], line[10]]
        converted = [ours if cell == AS_PATCHED else cell for cell, ours in zip(converted, patched, strict=True)]
        converted[1] = converted[0] if converted[1] == AS_FIRST else converted[1]
        names = (*(kind for kind, _ in STEPS if kind), "launches a layer", "of mx, a token")
        rows[line[0]] = {
            how: dict(zip(names, cells, strict=True)) for how, cells in zip(HOW, (patched, converted), strict=True)
        }
    return rows


def counts_of(cell: str) -> dict[str, int]:
    """A cell of counts, as numbers by name."""
    return {op: int(n) for op, _, n in (part.rpartition(" ") for part in cell.split(", ") if part)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="model files; all by default")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/models")
    options = parser.parse_args()
    results = measured(options.files or files())
    for kind in KINDS:
        text, page = table(results, kind), PAGES / f"{kind}.md"
        if options.write:
            page.write_text(PATTERN.sub(lambda _, text=text: text, page.read_text()))
        else:
            print(text)


if __name__ == "__main__":
    main()
