"""Write the tables of the measured rows, in this folder's README and in the project's.

Usage: `python docs/results/tables.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from result_rows import HERE, PARTS, provenance, read, table, times_as_fast
from sections.codec_tables import (
    READING,
    READING_TEXT,
    SPEC_COLUMN,
    alone,
    faster_than_bf16,
    quantised,
    short_quantised,
)
from sections.draft_table import accepted, drafts, parted
from sections.link_table import against_one, against_two, link
from sections.quality_tables import (
    NEW_SCALE,
    ablated,
    codecs,
    needles,
    over_contexts,
    quality,
    short_quality,
    turboquant,
)
from sections.readme_tables import attention_at_a_glance, speculation_at_a_glance, steps_at_a_glance, steps_of_8b
from sections.recall_tables import recall, short_costs, short_hits
from sections.round_table import against_plain, round_costs, rounds, with_texts
from sections.shape_table import shapes
from sections.speculation_tables import short_speculation, speculation
from sections.turn_table import turns
from sections.weight_tables import weight_products, weight_quality, weight_speculation, weight_steps, weights

from alspec.config import SpeculationConfig
from alspec.latency_model import StepCosts, speculative_step_us

OTHER_COMMIT = "\\* The pair was measured at an earlier commit than `off`."
OTHER_PARTS = "\\*\\* The parts given to the model were measured at another commit than the pair."
OTHER_GPU = " Those rows are from an earlier run, at an earlier commit."
OTHER_RUN = "FlashInfer was measured in an earlier run, at an earlier commit."
GPUS = (("", ""), ("_h100", " on H100"))  # for H200 and H100: suffixes of file names and of headings
TRANSPORTS = ("symm", "host", "nccl", "nccl without peer access")
TWO_GPUS = {"mode": "off", "world": 2, "transport": "symm"}
SHORT_HIT_RATES = (0.0, 0.5, 1.0)
SHORT_STEPS = (1024, 8192, 32768, 131072)
SHORT_CONTEXTS = ("1024", "4096", "8192", "10000", "32768", "131072", "262144", "ragged 8")


def main() -> None:
    """Rewrite docs/results/README.md, and the tables of README.md and docs/performance.md between their markers."""
    write_between(
        HERE.parents[1] / "README.md",
        steps_at_a_glance=steps_at_a_glance(),
        attention_at_a_glance=attention_at_a_glance(),
        speculation_at_a_glance=speculation_at_a_glance(),
    )
    write_between(
        HERE.parent / "performance.md",
        quality=short_quality(),
        speculation=short_speculation(),
        decode=short_decode(),
        decode_step=short_steps(),
        quantised=short_quantised(),
        linked_pair=against_one(read("linked_pair.jsonl")),
        linked_hosts=against_two(read("linked_hosts.jsonl"), steps_of_8b(**TWO_GPUS)),
    )
    write_between(HERE.parent / "turbo_attention.md", faster_than_bf16=faster_than_bf16(), reading_alone=alone())
    write_between(HERE.parent / "recall.md", recall_hits=short_hits(), recall_costs=short_costs())
    write_between(
        HERE.parent / "drafts.md",
        drafts=accepted(read("drafts.jsonl")),
        parted_texts=parted(read("draft_texts.jsonl")),
        rounds=against_plain(read("decode_rounds.jsonl"), with_ngram=False),
        round_costs=round_costs(read("decode_rounds.jsonl")),
        rounds_of_texts=with_texts(read("decode_rounds.jsonl")),
    )
    packed = read("weights.jsonl")
    write_between(
        HERE.parent / "weights.md",
        weight_steps=weight_steps(packed),
        weight_products=weight_products(packed),
        weight_quality=weight_quality(read("quality_weights.jsonl")),
        weight_speculation=weight_speculation(read("quality_weights.jsonl")),
    )
    ablations = read("quality_ablations.jsonl")
    sections = [
        *(part for gpu in GPUS for part in whole_steps(*gpu)),
        link(read("linked_pair.jsonl"), read("linked_hosts.jsonl"), steps_of_8b(**TWO_GPUS)),
        allreduce(read("allreduce.jsonl", "allreduce_rmsnorm")),
        *(part for gpu in GPUS for part in attention(*gpu)),
        *(prompts(f"Whole prompts{on_gpu}", read(f"prompt{gpu}.jsonl")) for gpu, on_gpu in GPUS),
        turns(read("second_turn.jsonl")),
        shapes("Decode attention on random shapes", read("shapes.jsonl"), "shapes.png"),
        shapes("Decode attention on random shapes on H100", read("shapes_h100.jsonl")),
        *(sampled(read(f"sampling{gpu}.jsonl"), f"Sampling in a step{on_gpu}") for gpu, on_gpu in GPUS),
        quality(read("quality.jsonl")),
        speculation(),
        *recall(),
        drafts(read("drafts.jsonl"), read("draft_texts.jsonl")),
        rounds(read("decode_rounds.jsonl")),
        weights(read("weights.jsonl"), read("quality_weights.jsonl")),
        codecs("Demo checkpoint over caches", read("quality_codecs.jsonl")),
        over_contexts(read("quality_codecs.jsonl")),
        needles(read("quality_codecs.jsonl")),
        turboquant(
            "Codecs and variants of TurboQuant", read("quality_turboquant.jsonl"), NEW_SCALE, "quality_bytes.png"
        ),
        codecs("Demo checkpoint over caches, in fp32", read("quality_codecs_fp32.jsonl")),
        *(
            part
            for title, dtype in (
                ("Softmax, block sizes and selectors", "bf16"),
                ("Softmax, block sizes and selectors, in fp32", "fp32"),
            )
            for part in ablated(title, [row for row in ablations if row["case"]["dtype"] == dtype])
        ),
    ]
    parts = [
        "# Measured rows and their tables",
        "What was measured, on which hardware, and by which command?",
        "Each `.jsonl` file here has one JSON line for each measured value, with the command that wrote it."
        " `python docs/results/tables.py` writes these tables from the rows, `python docs/results/pictures.py` draws"
        " the pictures. `corpus/` stands for texts of your own. `demo_candidates.jsonl` belongs to"
        " [the demo model's card](../../models/demo/README.md).",
        "*p50* is the median; *p20 / p50 / p80* are percentiles. `A~` is the speculative attention output"
        " ([glossary](../glossary.md)).",
        "\n".join(contents(sections)),
        "![Time of a whole step, and of decode attention, by context length](latency.png)",
        *sections,
    ]
    (HERE / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def write_between(page: Path, **tables: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->` by the table of that name."""
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        assert begin in text, f"{page} has no place for {name}"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{lines}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


def whole_steps(gpu: str, on_gpu: str) -> list[str]:
    """Sections on decode steps of one GPU type."""
    name = f"decode_step{gpu}.jsonl"
    return [
        steps(f"Decode steps{on_gpu}", read(name)),
        against_off(f"Pairs against tensor parallelism{on_gpu}", read(name), read(name, PARTS)),
    ]


def attention(gpu: str, on_gpu: str) -> list[str]:
    """Sections on attention alone of one GPU type."""
    return [
        decode(f"Decode attention{on_gpu}", read(f"decode_attention{gpu}.jsonl")),
        quantised(f"Decode attention over quantised caches{on_gpu}", read(f"turbo_attention{gpu}.jsonl")),
        prefill(f"Prefill attention over the INT8 stage{on_gpu}", read(f"prefill_attention{gpu}.jsonl")),
        ready(f"Time to the speculative output{on_gpu}", read(f"ready{gpu}.jsonl")),
    ]


def contents(sections: list[str]) -> list[str]:
    """Links to the sections that have a heading."""
    titles = [section.splitlines()[0][3:] for section in sections if section.startswith("## ")]
    return [f"- [{title}](#{title.lower().replace(',', '').replace(' ', '-')})" for title in titles]


def decode(title: str, rows: list[dict[str, Any]]) -> str:
    """Decode attention, one table for each shape: other libraries, ours, ours with `A~` and verdict."""
    if not rows:
        return ""
    text = ["Microseconds: p50, or p20 / p50 / p80.", READING_TEXT]
    parts = [f"## {title}", " ".join([*text, *other_run(rows)]), provenance(*rows)]
    head = ["context", "torch SDPA", "FlashInfer", "lean decode", "TB/s", "of stream", "against SDPA"]
    head += [SPEC_COLUMN, "its cost", READING]
    for shape, contexts in by_shape(rows).items():
        lines = []
        for context, found in contexts.items():
            ours, spec, sdpa = (found[name] for name in ("lean decode", SPEC_COLUMN, "torch SDPA"))
            p50, rate = ours["us"]["p50"], ours["bytes"] / ours["us"]["p50"] / 1e6
            line = [context, f"{sdpa['us']['p50']:.1f}"]
            line += [f"{found['FlashInfer']['us']['p50']:.1f}" if "FlashInfer" in found else "", spread(ours)]
            line += [f"{rate:.2f}", f"{rate / ours['stream_tb_s']:.0%}", f"{sdpa['us']['p50'] / p50:.2f}x"]
            line += [spread(spec), f"{spec['us']['p50'] / p50 - 1:+.1%}"]
            lines.append([*line, f"{found[READING]['us']['p50']:.1f}" if READING in found else ""])
        parts += [f"### {shape}", table(head, lines)]
    return "\n\n".join(parts)


def other_run(rows: list[dict[str, Any]]) -> list[str]:
    """A note if FlashInfer's rows are from another commit than ours."""
    commits = [{row["commit"] for row in rows if (row["impl"] == "flashinfer") == theirs} for theirs in (False, True)]
    return [OTHER_RUN] if commits[1] - commits[0] else []


def steps(title: str, rows: list[dict[str, Any]]) -> str:
    """Whole decode steps: a line for each configuration, a column for each context; repeated rows: the last."""
    if not rows:
        return ""
    contexts = sorted({row["case"]["context"] for row in rows})
    lines: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["case"]["hit_rate"] or 0.0):
        case = row["case"]
        key = (case["shape"], str(case["world"]), case["mode"], case["transport"] or "")
        key += ("captured" if case["cuda_graph"] else "one by one", case["dtype"], str(case["batch"]))
        lines.setdefault((*key, cache_of(row), hits(row)), {})[case["context"]] = row
    head = ["shape", "GPUs", "mode", "transport", "launches", "dtype", "batch", "cache", "hits", *map(str, contexts)]
    # The sort is stable: lines that differ only in hits stay in order.
    ordered = sorted(lines.items(), key=lambda item: item[0][:-1])
    cells = [[*key, *(rate(found.get(context)) for context in contexts)] for key, found in ordered]
    parts = [
        f"## {title}",
        "Tokens/s at the median step, by number of tokens in the cache. In brackets: the share of the limit, which is"
        " the time to read a rank's bytes at the stream bandwidth of the same run. Shapes: `checkpoint` is the bundled"
        " model after a text; `half` has 16 of the 8B shape's 32 layers; `slice` and `slice4` have what one of two or"
        " four ranks computes of the 8B shape ([its config.json](../decode_step.md#what-the-exchange-costs)). The rows"
        " come from several commits, which each row names, and from several machines.",
        provenance(*rows),
        table(head, cells),
    ]
    return "\n\n".join(parts)


def against_off(title: str, rows: list[dict[str, Any]], parts: list[dict[str, Any]]) -> str:
    """Pairs against tensor parallelism on the same GPUs, and against the latency model with measured parts."""
    measured: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in parts:
        measured.setdefault((*_setting(row), *spec_settings(row)), {})[row["case"]["part"]] = row
    lines = {}
    for row in rows:
        base = _matching_off(row, rows) if row["case"]["mode"] == "paired" else None
        if base is None:
            continue
        case = row["case"]
        p50, off = row["us"]["p50"] / 1e3, base["us"]["p50"] / 1e3
        line = [case["shape"], f"{case['world'] // 2} + {case['world'] // 2}", case["transport"], str(case["batch"])]
        line += [cache_of(row), str(case["context"]), hits(row)]
        cells = [f"{p50:.3f}", f"{off:.3f}", speedup(base, row), "", "", ""]
        found = measured.get((*_setting(row), *spec_settings(row)))
        # With several requests, a layer's hit rate is not that of the requests.
        if found and case["batch"] == 1:
            predicted = predicted_us(found, case["hit_rate"]) / 1e3
            slower = found["step"]["us"]["p50"] / found["step"]["untraced_us"] - 1
            mark = "" if found["step"]["commit"] == row["commit"] else "\\*\\*"
            cells[3:] = [f"{predicted:.3f}{mark}", f"{p50 / predicted - 1:+.1%}{mark}", f"{slower:+.1%}"]
        lines[tuple(line)] = line + cells
    if not lines:
        return ""
    head = ["shape", "GPUs", "transport", "batch", "cache", "context", "hits", "paired, ms", "off, ms", "against off"]
    head += ["model, ms", "measured against model", "steps slower while traced"]
    text = [
        "Medians. Forced hits are whole layers: `--hit-rates 0.65` accepts 20 of 32."
        " *model* is the prediction of `alspec/latency_model.py` from the parts of a layer below. A part is the median"
        " over the kernels of some traced steps; each kernel counts from the end of the kernel before it. The parts"
        " come from a separate run. `checkpoint` is the bundled model after a text: lambda = 0.1, real verdicts."
    ]
    names = ("attention", "sender", "receiver", "layer", "fixed", "step")
    cells = [
        [
            *(str(found["step"]["case"][name]) for name in ("shape", "world", "transport", "context")),
            cache_of(found["step"]),
            hits(found["step"]),
            *(f"{found[name]['us']['p50']:.1f}" if name in found else "" for name in names),
        ]
        for found in measured.values()
    ]
    for column, note in (("against off", OTHER_COMMIT), ("model, ms", OTHER_PARTS)):
        if any("*" in line[head.index(column)] for line in lines.values()):
            text.append(note)
    tables = [table(head, list(lines.values()))]
    if cells:
        tables += [
            "Parts of traced steps, in microseconds:",
            provenance(*parts),
            table(["shape", "GPUs", "transport", "context", "cache", "hits", *names], cells),
        ]
    return "\n\n".join([f"## {title}", *text, *tables])


def speedup(base: dict[str, Any], row: dict[str, Any]) -> str:
    """How many times as fast as `base`; marked if the two are from different commits."""
    return times_as_fast(base, row) + ("" if base["commit"] == row["commit"] else "\\*")


def predicted_us(parts: dict[str, dict[str, Any]], hit_rate: float) -> float:
    """Step time that the latency model predicts from rows of `decode_parts`."""
    p50 = {name: row["us"]["p50"] for name, row in parts.items()}
    costs = {f"{name}_us": us for name, us in p50.items() if name != "step"}
    return speculative_step_us(StepCosts(parts["layer"]["num_layers"], **costs), hit_rate)


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    """The settings that two steps must share to be compared."""
    case = row["case"]
    names = ("shape", "world", "transport", "cuda_graph", "dtype", "batch", "context", "kv_cache")
    return (*(case[name] for name in names), case.get("softmax", "exact"), case.get("text"))


def _matching_off(pair: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last step in tensor parallelism from the same commit as the pair, else from any commit."""
    of_all = [row for row in rows if row["case"]["mode"] == "off" and _setting(row) == _setting(pair)]
    of_commit = [row for row in of_all if row["commit"] == pair["commit"]]
    return (of_commit or of_all or [None])[-1]


def allreduce(rows: list[dict[str, Any]]) -> str:
    """The step's all-reduce alone, beside those of NCCL and PyTorch."""
    if not rows:
        return ""
    setups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        setups.setdefault((row["gpu"], row["case"].get("transport", "symm")), []).append(row)
    tables = []
    for (_, peer_memory), of_setup in setups.items():
        impls = list(dict.fromkeys(row["impl"] for row in of_setup))
        lines: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
        for row in of_setup:
            lines.setdefault((row["case"]["world"], row["case"]["batch"]), {})[row["impl"]] = row
        cells = [
            [str(world), str(batch), f"{next(iter(found.values()))['bytes'] // 1024}"]
            + [spread(found[impl]) if impl in found else "" for impl in impls]
            for (world, batch), found in sorted(lines.items())
        ]
        tables += ["Without peer access, packets through the host's memory:"] if peer_memory == "host" else []
        tables += [provenance(*of_setup), table(["GPUs", "batch", "KB", *impls], cells)]
    return "\n\n".join(
        [
            "## All-reduce alone",
            "p20 / p50 / p80 in microseconds of one all-reduce in a CUDA graph of many, on the slowest rank. Ours has"
            " two dependent launches, a push and a reduction. The reduction also adds the residual and prepares the"
            " next norm. For comparison: two empty launches.",
            *tables,
        ]
    )


def cache_of(row: dict[str, Any]) -> str:
    """Codec and softmax of a step's cache, and its content."""
    case = row["case"]
    softmax = "" if case.get("softmax", "exact") == "exact" else f" with {case['softmax']}"
    return f"{case['kv_cache']}{softmax}, {case.get('text') or 'random numbers'}"


def hits(row: dict[str, Any]) -> str:
    """Hit rate of a pair, whether it was forced, and lambda and S if they are not the defaults."""
    case = row["case"]
    measured = [] if case["hit_rate"] is None else [f"{case['hit_rate']:.0%}{' forced' if case['forced'] else ''}"]
    return ", ".join([*measured, *spec_settings(row)])


def spec_settings(row: dict[str, Any]) -> list[str]:
    """lambda (unless verdicts were forced) and S of a pair, if not the defaults; older rows lack them."""
    case, default = row["case"], SpeculationConfig()
    threshold, chunk_size = case.get("threshold", default.threshold), case.get("chunk_size", default.chunk_size)
    changed = [f"lambda {threshold}"] * (threshold != default.threshold and not case["forced"])
    return changed + [f"S = {chunk_size}"] * (chunk_size != default.chunk_size)


def rate(row: dict[str, Any] | None) -> str:
    """Tokens/s, and the share of the limit if nothing is skipped."""
    if row is None:
        return ""
    share = row["share_of_limit"]
    return f"{row['tokens_per_s']:.0f}" + ("" if share is None else f" ({share:.0%})")


def spread(row: dict[str, Any]) -> str:
    """Format p20 / p50 / p80 of a row."""
    return " / ".join(f"{row['us'][name]:.1f}" for name in ("p20", "p50", "p80"))


def by_shape(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Decode rows by shape, context (ascending, batches last) and column; the last of repeated rows counts."""
    names = {"torch.sdpa": "torch SDPA", "flashinfer": "FlashInfer", READING: READING}
    ours = {"decode_attention": "lean decode", "speculative_decode": SPEC_COLUMN}
    shapes: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        case = row["case"]
        contexts = shapes.setdefault(f"{case['heads']} heads of {case['head_dim']}", {})
        contexts.setdefault(str(case["context"]), {})[names.get(row["impl"]) or ours[row["bench"]]] = row
    return {
        shape: dict(sorted(contexts.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 10**9))
        for shape, contexts in shapes.items()
    }


def prefill(title: str, rows: list[dict[str, Any]]) -> str:
    """Prefill attention over the INT8 stage beside SDPA over bf16."""
    if not rows:
        return ""
    cases: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["case"]["tokens"], row["case"]["context"]), {})[row["impl"]] = row
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [
        [str(tokens), str(context)]
        + [
            f"{found[impl]['us']['p50']:.0f}, {found[impl]['tflop_s']:.0f} TFLOP/s,"
            f" {found['torch.sdpa']['us']['p50'] / found[impl]['us']['p50']:.2f}x"
            for impl in impls
        ]
        for (tokens, context), found in sorted(cases.items())
    ]
    return "\n\n".join(
        [
            f"## {title}",
            "p50 in microseconds, rate, and speed relative to SDPA; 32/8 heads of 128, causal.",
            provenance(*rows),
            table(["tokens", "context", *impls], lines),
        ]
    )


def prompts(title: str, rows: list[dict[str, Any]]) -> str:
    """Whole prompts: a line for each configuration and length. The last of repeated rows counts."""
    if not rows:
        return ""
    text = (
        "TTFT: time until the host has the first token after a prompt of random tokens, p20 / p50 / p80 over the given"
        " number of prompts. Rate and memory (of PyTorch's tensors) are those of one GPU. *peak* is the rate of a large"
        " bf16 matrix product in the same run. The rate counts the operations of the layers' matrices, of causal"
        " attention, and of the logits of one token."
    )
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        case, us = row["case"], row["us"]
        key = (case["shape"], case["world"], case.get("mode", "off"), case["kv_cache"], case["context"])
        times = " / ".join(f"{us[name] / 1e3:.1f}" for name in ("p20", "p50", "p80"))
        cells = [times, str(row["prompts"]), f"{case['context'] / us['p50'] * 1e6:.0f}", f"{row['tflop_s']:.0f}"]
        cells += [f"{row['peak_tflop_s']:.0f}", f"{row['share_of_peak']:.0%}"]
        cells += [f"{row[name] / 2**30:.2f}" for name in ("memory_bytes", "planned_bytes")]
        lines[key] = [*map(str, key), *cells]
    head = ["shape", "GPUs", "mode", "cache", "tokens", "TTFT, ms", "prompts", "tokens/s", "TFLOP/s", "peak", "of peak"]
    cells = [lines[key] for key in sorted(lines)]
    return "\n\n".join([f"## {title}", text, provenance(*rows), table([*head, "GiB", "GiB planned"], cells)])


# Settings of how a token is chosen, with the value that has no effect.
CHOICES = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CHOICES |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}}


def sampled(rows: list[dict[str, Any]], title: str = "Sampling in a step") -> str:
    """Time that sampling adds to a step, by context."""
    if not rows:
        return ""
    ways: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        case = row["case"]
        way = tuple(f"{name} {case[name]}" for name, off in CHOICES.items() if case.get(name, off) != off)
        ways.setdefault(way, {})[case["context"]] = row["us"]["p50"]
    greedy = ways.pop(())
    contexts = sorted(greedy)
    lines = [["greedy", *(f"{greedy[context] / 1e3:.3f}" for context in contexts)]]
    for way, times in ways.items():
        cells = [
            f"{times[context] / 1e3:.3f} (+{times[context] - greedy[context]:.0f} us)" if context in times else ""
            for context in contexts
        ]
        lines.append([", ".join(way), *cells])
    return "\n\n".join(
        [
            f"## {title}",
            "Whole captured steps: p50 in ms, and the difference to greedy choice.",
            provenance(*rows),
            table(["choice", *(f"{context} tokens" for context in contexts)], lines),
        ]
    )


def ready(title: str, rows: list[dict[str, Any]]) -> str:
    """Time until `A~` can be used, by context."""
    if not rows:
        return ""
    columns = sorted({(row["num_gpus"], row["case"]["seen_by"], row["case"]["chunk_size"]) for row in rows})
    parts = [
        f"## {title}",
        "Time from the end of the kernel before speculative decode until a waiting kernel has seen all of `A~`: p50 in"
        " microseconds, cold L2, for chunk sizes S. *this GPU* sends `A~`. The *second GPU* receives it in its memory;"
        " then the time is by the second GPU's clock, which packets back and forth compare with the first one's right"
        " before each launch." + (OTHER_GPU if len({row["commit"] for row in rows}) > 1 else ""),
        provenance(*rows),
    ]
    head = ["context", *(f"{place}, S = {chunk_size}" for _, place, chunk_size in columns)]
    for shape in dict.fromkeys((row["case"]["heads"], row["case"]["head_dim"]) for row in rows):
        found = {
            (row["case"]["context"], (row["case"]["seen_by"], row["case"]["chunk_size"])): f"{row['us']['p50']:.1f}"
            for row in rows
            if (row["case"]["heads"], row["case"]["head_dim"]) == shape
        }
        contexts = sorted({context for context, _ in found})
        lines = [[str(context), *(found.get((context, column[1:]), "") for column in columns)] for context in contexts]
        parts += [f"### {shape[0]} heads of {shape[1]}", table(head, lines)]
    return "\n\n".join(parts)


def short_decode() -> str:
    """Medians of decode attention of the 8B shape, by context."""
    rows = read("decode_attention.jsonl")
    shape = "32/8 heads of 128"
    contexts = {context: found for context, found in by_shape(rows)[shape].items() if context in SHORT_CONTEXTS}
    lines = [
        [name, *(f"{found[name]['us']['p50']:.1f}" if name in found else "" for found in contexts.values())]
        for name in ("torch SDPA", "FlashInfer", "lean decode", SPEC_COLUMN)
    ]
    return "\n\n".join([table([f"{shape}, us", *contexts], lines), *other_run(rows), provenance(*rows)])


def short_steps() -> str:
    """Captured steps of the 8B shape, one request: tensor parallelism, then pairs; empty if there are no rows."""
    rows = [
        row
        for row in read("decode_step.jsonl")
        if row["case"]["shape"] == "llama-3.1-8b"
        and row["case"]["batch"] == 1
        and row["case"]["cuda_graph"]
        and row["case"]["kv_cache"] == "bf16"
        and not row["case"].get("text")
    ]
    if not rows:
        return ""
    off: dict[int, dict[int, str]] = {}
    shown: dict[Any, dict[str, Any]] = {}
    for row in rows:
        case = row["case"]
        if case["mode"] == "off" and case["transport"] in (None, "symm"):
            off.setdefault(case["world"], {})[case["context"]] = rate(row)
            shown[_setting(row)] = row
    pairs: dict[tuple[int, str, float], dict[int, str]] = {}
    for row in rows:
        case = row["case"]
        base = _matching_off(row, rows) if case["mode"] == "paired" else None
        if base is not None and case["hit_rate"] in SHORT_HIT_RATES and not spec_settings(row):
            key = case["world"], case["transport"], case["hit_rate"]
            pairs.setdefault(key, {})[case["context"]] = f"{row['tokens_per_s']:.0f} ({speedup(base, row)})"
            shown |= {(_setting(row), base["commit"]): base, (*key, case["context"]): row}
    contexts = sorted(set().union(*off.values()) & set(SHORT_STEPS))
    tables = [
        table(
            ["GPUs, off", *map(str, contexts)],
            [[str(world), *(off[world].get(context, "") for context in contexts)] for world in sorted(off)],
        )
    ]
    if pairs:
        contexts = sorted(set().union(*pairs.values()))
        lines = [
            [f"{world // 2} + {world // 2}", transport, f"{hit_rate:.0%}", *(found.get(at, "") for at in contexts)]
            for (world, transport, hit_rate), found in sorted(
                pairs.items(), key=lambda item: (item[0][0], TRANSPORTS.index(item[0][1]), item[0][2])
            )
        ]
        tables.append(table(["GPUs, paired", "transport", "hits", *map(str, contexts)], lines))
    notes = [OTHER_COMMIT] if any("*" in cell for found in pairs.values() for cell in found.values()) else []
    return "\n\n".join([*tables, *notes, provenance(*shown.values())])


if __name__ == "__main__":
    main()
