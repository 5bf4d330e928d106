"""What pages say is what the measured rows say; and what they name is there."""

import gzip
import importlib
import json
import re

import pytest
from paths import ROOT


def medians_of(name: str, **of_case: object) -> dict[object, float]:
    """p50 in us of the measured rows of one file that have this bench, impl, commit or case, by context."""
    rows = map(json.loads, (ROOT / "docs" / "results" / f"{name}.jsonl").read_text().splitlines())
    names = ("bench", "impl", "commit")
    flat = (row["case"] | {name: row[name] for name in names} | {"p50": row["us"]["p50"]} for row in rows)
    return {row["context"]: row["p50"] for row in flat if of_case.items() <= row.items()}


def span_of(ratios: list[float], digits: int = 2) -> str:
    """From the least to the largest."""
    return f"{min(ratios):.{digits}f}x to {max(ratios):.{digits}f}x"


def test_prose_says_what_the_rows_say() -> None:
    """Ratios outside of the tables that tables.py makes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    step = {"shape": "llama-3.1-8b", "world": 1, "mode": "off", "bench": "decode_step"}
    bf16, *quantised = (
        medians_of("decode_step", **step, kv_cache=codec)[131072] for codec in ("bf16", "turbo4", "turbo-mixed")
    )
    turbo4, mixed = (f"{bf16 / us:.2f}x" for us in quantised)
    without_peers = step | {"transport": "nccl without peer access"}
    medians = [medians_of("decode_step", **without_peers | {"world": world}).values() for world in (2, 4)]
    two, four = (" and ".join(f"{1e6 / us:.0f}" for us in of_world) for of_world in medians)
    peerless = f"`off` likewise, reaches, at 8K and 128K tokens, {two} tokens/s on two GPUs and {four} on four."
    assert peerless in " ".join(readme.split())
    assert f"at 128K they are {turbo4} and {mixed} as fast." in " ".join(readme.split())
    short = [medians_of("decode_step", **step, kv_cache=codec)[1024] for codec in ("bf16", "turbo4", "turbo-mixed")]
    assert f"Steps of 1K tokens are level ({100 * (short[0] / min(short) - 1):.1f} %);" in readme
    of_host = medians_of("decode_step", **step | {"world": 2, "transport": "host"}).values()
    through_host = " and ".join(f"{1e6 / us:.0f}" for us in of_host)
    assert f"`off` over it reaches {through_host} tokens/s on two GPUs at these lengths." in " ".join(readme.split())
    of_four = step | {"world": 4, "transport": "symm", "commit": "b9a9b2a"}
    first, *others = (
        medians_of("decode_step", **of_four, kv_cache=codec)[131072] for codec in ("bf16", "turbo4", "turbo-mixed")
    )
    turbo4, mixed = (f"{first / us:.2f}x" for us in others)
    assert f"On four GPUs, with 2 KV heads on each, it is {turbo4} and {mixed}." in " ".join(readme.split())
    pair = {"shape": "llama-3.1-8b", "world": 2, "transport": "symm", "kv_cache": "bf16", "hit_rate": 1.0}
    against_one = bf16 / medians_of("decode_step", **pair)[131072]
    assert f"with every guess accepted are {against_one:.2f}x as fast at 128K" in readme


def test_prose_about_pairs_and_other_shapes_says_what_the_rows_say() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = " ".join(readme.split())
    of = {"bench": "decode_step", "kv_cache": "bf16"}

    def pair_against_off(**case: object) -> dict[object, float]:
        off, pair = (medians_of("decode_step", **of, **case, mode=mode) for mode in ("off", "paired"))
        return {context: off[context] / us for context, us in pair.items()}

    eight = pair_against_off(shape="llama-3.1-8b", world=2, transport="symm")  # of the last rate: every guess accepted
    assert f"at 128K tokens, at {eight[131072]:.2f}x of that speed, if every guess is accepted" in prose
    real = pair_against_off(shape="checkpoint", world=2)
    assert f"1 + 1 GPUs come to {min(real.values()):.2f}x to {max(real.values()):.2f}x of two" in prose
    demo = of | {"shape": "checkpoint"}
    alone = medians_of("decode_step_h100", **demo, world=1)
    for transport, first, second in (
        ("symm", "1 + 1 H100s to {},", "2 + 2 to {} of four."),
        (
            "nccl without peer access",
            "Over NCCL without peer access 1 + 1 H100s come to {} of two,",
            "2 + 2 come to {} of four.",
        ),
    ):
        for world, sentence in ((2, first), (4, second)):
            case = demo | {"world": world, "transport": transport}
            off, pair = (medians_of("decode_step_h100", **case, mode=mode) for mode in ("off", "paired"))
            assert sentence.format(span_of([off[context] / us for context, us in pair.items()])) in prose
            if sentence is first and transport != "symm":
                faster = span_of([us / alone[context] for context, us in pair.items()], digits=1)
                assert f"one H100 alone is {faster} as fast." in prose
    large, middle, small = (
        1e6 / medians_of("decode_step", **of, shape=f"llama-3.{name}b", world=world, mode="off")[8192]
        for name, world in (("1-70", 4), ("1-70", 2), ("2-1", 1))
    )
    one = of | {"shape": "llama-3.1-8b", "world": 1}
    batches = {size: medians_of("decode_step_h100", **one, batch=size) for size in (2, 4, 8)}
    *first, last = (f"{size * 1e6 / us[8192]:.0f}" for size, us in batches.items())
    assert f"8K tokens each, reach {', '.join(first)} and {last} tokens/s on one H100, 91 % of the limit" in prose
    assert f"70B shape on four GPUs runs at {large:.0f} tokens/s (8K tokens" in prose
    rows = map(json.loads, (ROOT / "docs" / "results" / "decode_step.jsonl").read_text().splitlines())
    cases = {
        tuple(row["case"][name] for name in ("shape", "world", "mode", "context", "kv_cache")): row for row in rows
    }
    of_two = cases["llama-3.1-70b", 2, "off", 8192, "bf16"]["share_of_limit"]
    at_128k = [1e6 / cases["llama-3.1-70b", 2, "off", 131072, codec]["us"]["p50"] for codec in ("bf16", "turbo4")]
    long = "at 128K tokens at {:.0f}, over `turbo4` at {:.0f}. ".format(*at_128k)
    assert f"on two at {middle:.0f} ({100 * of_two:.0f} %), {long}A 1B shape on one reaches {small:.0f}." in prose
    of_70b = pair_against_off(shape="llama-3.1-70b", world=4, transport="symm")
    assert f"run at {of_70b[8192]:.2f}x of four at 8K tokens and at {of_70b[131072]:.2f}x at 128K" in prose


def test_prose_about_transports_says_what_the_rows_say() -> None:
    """The 8B shape on H100s over NVLink, through the host's memory and over NCCL without peer access."""
    prose = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    of = {"bench": "decode_step", "kv_cache": "bf16", "shape": "llama-3.1-8b"}
    rates, ratios, steps = {}, {}, {}
    for way, transport in (("nvlink", "symm"), ("host", "host"), ("nccl", "nccl without peer access")):
        for world in (2, 4):
            case = of | {"transport": transport, "world": world}
            off = medians_of("decode_step_h100", **case, mode="off")
            every = medians_of("decode_step_h100", **case, hit_rate=1.0)
            rates[way, world] = " and ".join(f"{1e6 / off[context]:.0f}" for context in (8192, 131072))
            steps[way, world] = f"{off[8192] / 1e3:.2f}"
            ratios[way, world] = f"{off[131072] / every[131072]:.2f}x"
    host, nccl, nvlink = (f"{rates[way, 2]}, four {rates[way, 4]}" for way in ("host", "nccl", "nvlink"))
    assert f"Tensor parallelism through the host's memory: two {host}." in prose
    assert f"Over NCCL two reach {nccl}; with peer access, over NVLink, two {nvlink}." in prose
    host = f"1 + 1 at {ratios['host', 2]} of two and 2 + 2 at {ratios['host', 4]} of four"
    nccl = f"{ratios['nccl', 2]} and {ratios['nccl', 4]}"
    assert f"through the host's memory {host}, over NCCL at {nccl} (" in prose
    page = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    two, four = ([steps[way, world] for way in ("host", "nccl", "nvlink")] for world in (2, 4))
    host, nccl, nvlink = two
    of_two = f"{host} ms through the host's memory, {nccl} over NCCL without peer access and {nvlink} over NVLink"
    assert f"takes two H100s {of_two}; four {four[0]}, {four[1]} and {four[2]}." in page


def test_the_latency_model_is_as_near_as_said() -> None:
    text = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    h200, _, h100 = text.partition("## Pairs against tensor parallelism on H100")
    prose = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    for section, place, count, sentence in (
        (
            h100,
            "llama-3.1-8b | 2 + 2 | symm",
            15,
            "128K over `turbo4`, it is within {} % of the steps at every hit rate",
        ),
        (h100, "llama-3.1-8b | 1 + 1 | symm", 15, "Of 1 + 1 it is within {} %,"),
        (
            h100,
            "llama-3.1-8b | 1 + 1 | nccl without peer access",
            10,
            "over collectives without peer access within {} %",
        ),
        (
            h100,
            "llama-3.1-8b | 2 + 2 | nccl without peer access",
            10,
            "By parts of an earlier version it is within {} % of 2 + 2 there",
        ),
        (h100, "llama-3.1-8b | 1 + 1 | host", 5, "through the host's memory, within {} % of 1 + 1 at 8K tokens"),
        (h200, "llama-3.1-8b | 1 + 1 | symm", 15, "Of 1 + 1 H200s it is within {} %, of the 70B shape"),
        (h200, "llama-3.1-70b | 2 + 2 | symm", 5, "of the 70B shape on 2 + 2 at 128K tokens within {} %."),
    ):
        lines = [line for line in section.splitlines() if line.startswith(f"| {place} |")]
        found = [re.search(r"\| ([+-][\d.]+)%[\\*]* \| [+-]", line) for line in lines]
        errors = [abs(float(match[1])) for match in found if match]
        assert len(errors) == count, place
        assert sentence.format(max(errors)) in prose


def test_decode_steps_beside_others_are_those_of_the_rows() -> None:
    prose = (ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8")
    case = {"bench": "decode_step", "shape": "llama-3.1-8b", "mode": "off", "kv_cache": "bf16"}
    for world, transport in ((1, None), (4, "symm")):
        us = medians_of("decode_step", **case, world=world, transport=transport)
        tokens_per_s = " | ".join(f"{1e6 / us[context]:.0f}" for context in (1024, 8192, 131072))
        assert f"| alspec, `off` | {world} x H200 | {tokens_per_s} |" in prose


def test_prose_about_the_exchange_says_what_the_rows_say() -> None:
    """A rank's share alone, and all ranks, in milliseconds; what is exposed of each of 64 all-reduces."""
    prose = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    alone, both = (
        medians_of("decode_step_h100", mode="off", shape=shape, world=world, kv_cache="bf16", commit="4d4fc6c")
        for shape, world in (("slice", 1), ("llama-3.1-8b", 2))
    )
    contexts = (1024, 8192, 32768, 131072)
    for us in (alone, both):
        *first, last = (f"{us[context] / 1e3:.3f}" for context in contexts)
        assert f"{', '.join(first)} and {last}" in prose
    exposed = sorted((both[context] - alone[context]) / 64 for context in contexts)
    assert f"{exposed[0]:.1f} to {exposed[-1]:.1f} us longer" in prose

    alone, four = (
        medians_of("decode_step", kv_cache="bf16", shape=shape, transport=transport, mode="off", commit="b9a9b2a")
        for shape, transport in (("slice4", None), ("llama-3.1-8b", "symm"))
    )
    for us in (alone, four):
        *first, last = (f"{us[context] / 1e3:.3f}" for context in contexts)
        assert f"{', '.join(first)} and {last}" in prose
    exposed = sorted((four[context] - alone[context]) / 64 for context in contexts)
    assert f"{exposed[0]:.1f} to {exposed[-1]:.1f} us exposed" in prose


def test_prose_about_a_layer_on_four_gpus_says_what_the_rows_say() -> None:
    """Its time beyond its bytes, of a whole step, and of what 16 layers more take."""
    prose = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    rows = map(json.loads, (ROOT / "docs" / "results" / "decode_step.jsonl").read_text().splitlines())
    case = {"world": 4, "mode": "off", "transport": "symm", "kv_cache": "bf16"}
    found = {
        (row["case"]["shape"], row["case"]["context"]): row
        for row in rows
        if row["bench"] == "decode_step" and case.items() <= row["case"].items() and row["commit"] == "dbc3e3f"
    }

    def us_of(shape: str, context: int) -> tuple[float, float]:
        """A step, and its bytes at the rate of the stream."""
        row = found[shape, context]
        return row["us"]["p50"], row["bytes"] / row["stream_tb_s"] / 1e6

    (step, of_bytes), (of_half, _) = us_of("llama-3.1-8b", 8192), us_of("half", 8192)
    assert f"takes {step / 1e3:.3f} ms at 8K tokens: {(step - of_bytes) / 32:.1f} us a layer beyond its bytes" in prose
    more = {}
    for context in (8192, 131072):
        both = zip(us_of("llama-3.1-8b", context), us_of("half", context), strict=True)
        layer, bytes_of_layer = ((whole - half) / 16 for whole, half in both)
        more[context] = f"{layer:.1f}", f"{layer - bytes_of_layer:.1f}"
    of_8k, of_128k = more[8192], more[131072]
    assert (
        f"(`half` in the rows) it takes {of_half / 1e3:.3f}: {of_8k[0]} us for each of the others, {of_8k[1]} of them"
        f" beyond its bytes; at 128K tokens {of_128k[0]} and {of_128k[1]}." in prose
    )


def test_published_steps_are_those_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    prose = (ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8")
    for world, reported in importlib.import_module("pictures").REPORTED.items():
        assert f"| gpt-fast | {world} x H200 | | {reported[8192]} | {reported[131072]} |" in prose


def test_prose_about_the_latency_model_says_what_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    tables = importlib.import_module("tables")
    prose = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    rows = tables.read("decode_step.jsonl", tables.PARTS)
    of_run = {"shape": "llama-3.1-8b", "context": 131072, "kv_cache": "bf16", "hit_rate": 0.5}
    parts = {row["case"]["part"]: row for row in rows if of_run.items() <= row["case"].items()}
    case = parts["step"]["case"]
    none, half, every = (f"{tables.predicted_us(parts, rate) / 1e3:.2f}" for rate in (0.0, 0.5, 1.0))
    untraced = f"{parts['step']['untraced_us'] / 1e3:.2f}"
    assert f"it predicts {half} ms for such a step; without a profiler, those of the same run took {untraced}" in prose
    assert f"It predicts {every} with every guess accepted and {none} with none" in prose
    names = ("shape", "world", "transport", "kv_cache")
    of_pair = {"bench": "decode_step", "mode": "paired"} | {name: case[name] for name in names}
    worst, best = (f"{medians_of('decode_step', **of_pair, hit_rate=rate)[131072] / 1e3:.2f}" for rate in (0.0, 1.0))
    assert f"with none; steps took {best} and {worst} " in prose


def test_prose_about_sampling_and_prompts_says_what_the_rows_say() -> None:
    readme, step = (
        " ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in ("README.md", "docs/decode_step.md")
    )
    rows = [json.loads(line) for line in (ROOT / "docs" / "results" / "sampling.jsonl").read_text().splitlines()]
    us = {
        (row["case"].get("top_k"), row["case"].get("top_p"), row["case"]["context"]): row["us"]["p50"] for row in rows
    }
    assert len(us) == len(rows)
    more = [value - us[None, None, context] for (_, top_p, context), value in us.items() if top_p is not None]
    assert f"it adds {min(more) / 1e3:.2f} to {max(more) / 1e3:.2f} ms to a step of one GPU" in readme
    greedy, top_p = us[None, None, 1024], us[0, 0.9, 1024]
    assert f"took a step from {greedy / 1e3:.2f} to {top_p / 1e3:.2f} ms with top-p" in step

    prompts = [json.loads(line) for line in (ROOT / "docs" / "results" / "prompt.jsonl").read_text().splitlines()]
    found = {
        (row["num_gpus"], row["case"].get("mode", "off"), row["case"]["kv_cache"], row["case"]["context"]): row
        for row in prompts
    }
    assert len(found) == len(prompts)

    def seconds(num_gpus: int, mode: str, cache: str, digits: int) -> list[str]:
        of = [found[num_gpus, mode, cache, context] for context in (8192, 32768, 131072)]
        return [f"{row['us']['p50'] / 1e6:.{1 if row['case']['context'] > 2**16 else digits}f}" for row in of]

    bf16, turbo4 = (seconds(1, "off", cache, 2) for cache in ("bf16", "turbo4"))
    shares = [f"{100 * found[1, 'off', cache, 8192]['share_of_peak']:.0f} %" for cache in ("bf16", "turbo4")]
    assert (
        f"8K tokens take {bf16[0]} s over bf16 and {turbo4[0]} s over `turbo4`, at {' and '.join(shares)} of" in readme
    )
    assert [found[1, "off", cache, 131072]["prompts"] for cache in ("bf16", "turbo4")] == [1, 1], "one prompt each"
    assert f"128K tokens take {bf16[2]} s over the bf16 cache and {turbo4[2]} s over `turbo4`" in readme
    pair, pair4, both, both4 = (
        "{}, {} and {}".format(*seconds(2, mode, cache, 2))
        for mode in ("paired", "off")
        for cache in ("bf16", "turbo4")
    )
    assert (
        f"over bf16 take a pair {pair} s, the two in tensor parallelism {both}; over `turbo4` {pair4} s, and {both4}"
        in step
    )
    pairs, four = (seconds(4, mode, "bf16", 2)[-1] for mode in ("paired", "off"))
    assert (
        f"take 1 + 1 H200s {pair.split()[-1]} s and 2 + 2 {pairs}, "
        f"two in tensor parallelism {both.split()[-1]} and four {four}."
    ) in readme


SHAPES = (("32/8", 128), ("8/2", 128), ("32/8", 64))


def medians_of_decode(impl: str, shape: tuple[str, int], bench: str = "decode_attention") -> dict[int, float]:
    """Those of decode attention of one request."""
    found = medians_of("decode_attention", bench=bench, impl=impl, heads=shape[0], head_dim=shape[1])
    return {context: us for context, us in found.items() if isinstance(context, int)}


def test_prose_about_decode_attention_says_what_the_rows_say() -> None:
    readme, lean = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/lean_attention.md"))
    ours = "alspec.lean_decode_attention"

    def speedups(rival: str, longest: int = 2**20) -> list[list[float]]:
        """Of each shape, at every length up to the longest."""
        both = [(medians_of_decode(rival, shape), medians_of_decode(ours, shape)) for shape in SHAPES]
        return [[theirs[n] / us for n, us in mine.items() if n <= longest] for theirs, mine in both]

    early, sdpa, flashinfer = speedups("torch.sdpa", 8192), speedups("torch.sdpa"), speedups("flashinfer")
    up_to_8k, of_sdpa, of_flashinfer = (
        [f"{min(x):.2f}x to {max(x):.2f}x" for x in of] for of in (early, sdpa, flashinfer)
    )
    assert f"| 1.3x SDPA up to 8K | {up_to_8k[0]}, {up_to_8k[1]} (8/2), {up_to_8k[2]} (head_dim 64) |" in lean
    for rival, found in (("SDPA", of_sdpa), ("FlashInfer", of_flashinfer)):
        line = f"| never slower than {rival} | at 32/8 {found[0]}, at 8/2 {found[1]}, at head_dim 64 {found[2]} | |"
        assert line in lean
    # "The fastest at every length", by what at the longest, and by what up to 8K.
    assert min(map(min, sdpa + flashinfer)) > 1
    longest = [100 * (of_shape[-1] - 1) for of_shape in sdpa]
    prose = " ".join(readme.split())
    least, most = min(map(min, early)), max(map(max, early))
    assert (
        f"{least:.2f}x to {most:.2f}x as fast as SDPA up to 8K tokens, and {min(longest):.1f} to {max(longest):.0f} % "
        "faster at 256K."
    ) in prose

    for context, name in ((8192, "5 % at 8K"), (131072, "2 % at 128K")):
        costs = []
        for shape in SHAPES:
            plain, guess = (
                medians_of_decode(ours, shape, bench)[context] for bench in ("decode_attention", "speculative_decode")
            )
            costs.append(f"{100 * (guess / plain - 1):.1f} %")
        assert f"| speculation: {name} | {costs[0]}, {costs[1]} (8/2), {costs[2]} (head_dim 64) |" in lean


def test_prose_about_an_h100_says_what_the_rows_say() -> None:
    """Attention alone, prompts of a pair, and a layer of a step on four."""
    pages = ("lean_attention", "turbo_attention", "decode_step")
    lean, turbo, step = (" ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split()) for page in pages)
    ours, kinds = "alspec.lean_decode_attention", ("decode_attention", "speculative_decode")
    least, costs, padded = [], [], []
    for heads, head_dim in SHAPES:
        shape = {"heads": heads, "head_dim": head_dim}
        plain, guess, sdpa = (
            medians_of("decode_attention_h100", **shape, bench=bench, impl=impl)
            for bench, impl in ((kinds[0], ours), (kinds[1], ours), (kinds[0], "torch.sdpa"))
        )
        ratios = {context: us / plain[context] for context, us in sdpa.items() if isinstance(context, int)}
        least.append((min(ratio for context, ratio in ratios.items() if context <= 8192), min(ratios.values())))
        costs.append([f"{100 * (guess[context] / plain[context] - 1):.1f} %" for context in (8192, 131072)])
        padded.append(f"{plain['padded 8'] / plain['ragged 8']:.2f}x")
    assert min(slowest for _, slowest in least) == least[2][1]
    assert f"and {least[2][1]:.3f}x SDPA at the slowest point, 256K tokens with heads of 64" in lean
    early = [f"{ratio:.2f}x" for ratio, _ in least]
    assert f"Up to 8K tokens it is {early[0]}, {early[1]} (8/2) and {early[2]} (head_dim 64) or more" in lean
    short, long = ("{}, {} and {}".format(*of) for of in zip(*costs, strict=True))
    assert f"A guess costs {short} at 8K, {long} at 128K" in lean
    assert "take {}, {} and {}, as many times".format(*padded) in lean

    def speedups(codec: str, bench: str) -> list[str]:
        of = {"heads": "32/8", "bench": bench}
        bf16 = medians_of("turbo_attention_h100", **of, codec="bf16", impl=ours)
        quantised = medians_of("turbo_attention_h100", **of, codec=codec, impl="alspec.flashq_decode_attention")
        return [f"{bf16[context] / quantised[context]:.2f}x" for context in (8192, 32768, 131072)]

    plain4, guess4, *mixed = (speedups(codec, bench) for codec in ("turbo4", "turbo-mixed") for bench in kinds)
    assert (
        "`turbo4` {} at 8K tokens, {} at 32K and {} at 128K, with guesses {}, {} and {};".format(*plain4, *guess4)
        in turbo
    )
    assert f"`turbo-mixed` {mixed[0][2]} and {mixed[1][2]} at 128K." in turbo

    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"at 128K tokens is {plain4[2]} as fast over `turbo4` as over bf16, and {mixed[0][2]} over `turbo-mixed`"
        in readme
    )
    int8, sdpa = (
        [medians_of("prefill_attention_h100", impl=impl, tokens=tokens)[tokens] for tokens in (8192, 32768)]
        for impl in ("alspec.int8_prefill_attention", "torch.sdpa")
    )
    speed = [f"{theirs / us:.2f}x" for us, theirs in zip(int8, sdpa, strict=True)]
    assert f"Prefill attention runs at {speed[0]} and {speed[1]} of SDPA's speed on that H100." in readme
    assert f"it is {speed[0]} and {speed[1]}." in turbo

    prompts = {"kv_cache": "turbo4", "bench": "prompt"}
    seconds = [
        f"{medians_of('prompt_h100', **prompts, world=world, mode=mode)[8192] / 1e6:.3f}"
        for world in (2, 4)
        for mode in ("paired", "off")
    ]
    assert (
        f"take a pair {seconds[0]} s and the two in tensor parallelism {seconds[1]}, "
        f"on four {seconds[2]} and {seconds[3]}" in step
    )
    assert (
        f"8K tokens over `turbo4` take 1 + 1 {seconds[0]} s and 2 + 2 {seconds[2]}, two in tensor parallelism "
        f"{seconds[1]} and four {seconds[3]} " in readme
    )
    steps = {
        (row["case"]["world"], row["case"]["hit_rate"], row["case"]["context"]): row
        for row in map(json.loads, (ROOT / "docs" / "results" / "decode_step_h100.jsonl").read_text().splitlines())
        if row["bench"] == "decode_step" and (row["case"]["shape"], row["case"]["batch"]) == ("llama-3.1-8b", 1)
        if (row["case"]["transport"], row["case"]["kv_cache"]) == ("symm", "bf16")
    }
    for world, sentence, hits in (
        (2, "Two H100s reach {} tokens/s at 8K tokens and {} at 128K, {} and {} of their limit", "accepted {} and {}."),
        (4, "Four reach {} and {}, {} and {};", "2 + 2 with every guess accepted {} and {}"),
    ):
        off, paired = ([steps[world, rate, context] for context in (8192, 131072)] for rate in (None, 1.0))
        rates, pair = ([f"{row['tokens_per_s']:.0f}" for row in of] for of in (off, paired))
        assert sentence.format(*rates, *(f"{100 * row['share_of_limit']:.0f} %" for row in off)) in readme
        assert hits.format(*pair) in readme
    four = {"world": 4, "mode": "off", "bench": "decode_step", "kv_cache": "bf16", "transport": "symm", "batch": 1}
    whole, half = (medians_of("decode_step_h100", **four, shape=shape) for shape in ("llama-3.1-8b", "half"))
    layers = [(whole[context] - half[context]) / 16 for context in (8192, 131072)]
    assert (
        f"On four H100s it takes {whole[8192] / 1e3:.3f} ms, and with 16 layers {half[8192] / 1e3:.3f}: "
        f"{layers[0]:.1f} us for each of the others" in step
    )
    assert f"at 128K tokens {layers[1]:.1f} and" in step


def test_prose_about_quantised_caches_says_what_the_rows_say() -> None:
    """How many times faster than the bf16 kernel of the same run."""
    prose = (ROOT / "docs" / "turbo_attention.md").read_text(encoding="utf-8")

    def speedups(heads: str, codec: str, bench: str = "decode_attention", of_bf16: str = "decode_attention") -> str:
        shape = {"heads": heads}
        bf16 = medians_of("turbo_attention", **shape, bench=of_bf16, codec="bf16", impl="alspec.lean_decode_attention")
        ours = medians_of("turbo_attention", **shape, bench=bench, codec=codec, impl="alspec.flashq_decode_attention")
        return " | ".join(f"{bf16[context] / us:.2f}x" for context, us in ours.items())

    assert f"| `turbo4` | 1.8x at 8K, 2.7x at 32K, 3.3x at 128K | {speedups('32/8', 'turbo4')} |" in prose
    guess = "speculative_decode"
    assert f"| `turbo4`, both with guess and verdict | the same | {speedups('32/8', 'turbo4', guess, guess)} |" in prose
    assert f"| `turbo4` with them, bf16 without | | {speedups('32/8', 'turbo4', guess)} |" in prose
    assert f"| `turbo-mixed` | 4.2x at 128K | {speedups('32/8', 'turbo-mixed')} |" in prose
    mixed = speedups("32/8", "turbo-mixed", guess, guess)
    assert f"| `turbo-mixed`, both with guess and verdict | the same | {mixed} |" in prose
    assert f"| `turbo4`, 8/2 heads | | {speedups('8/2', 'turbo4')} |" in prose


def test_prose_about_quality_of_quantised_caches_says_what_the_rows_say() -> None:
    prose = (ROOT / "docs" / "turbo_attention.md").read_text(encoding="utf-8")
    rows = map(json.loads, (ROOT / "docs" / "results" / "quality_codecs.jsonl").read_text().splitlines())
    names = ("cache", "measure", "threshold", "context", "depth")
    found = {tuple(row["case"][name] for name in names): row for row in rows}

    def bits(cache: str, threshold: str) -> dict[str, float]:
        return found[cache, "bits per byte", threshold, 8192, None]

    def more(cache: str, threshold: str, digits: int) -> str:
        change = 100 * (bits(cache, threshold)["value"] / bits("bf16", threshold)["value"] - 1)
        return f"+{change:.{digits}f} %"

    for cache, digits in (("turbo4", 2), ("turbo-mixed", 2), ("turbo2", 1)):
        recalled = (
            f"{100 * found[cache, measure, '0.0', context, None]['value']:.0f}"
            for measure, context in (("recall", 8192), ("record recall", 5623))
        )
        cells = [more(cache, threshold, digits) for threshold in ("0.0", "0.1")]
        cells += [*recalled, f"{100 * bits(cache, '0.1')['hit_rate']:.1f} %"]
        assert f"| `{cache}` | {' | '.join(cells)} |" in prose
    exact, guessed = (f"{bits('bf16', threshold)['value']:.4f}" for threshold in ("0.0", "0.1"))
    assert f"| bf16 | {exact} | {guessed} |" in prose


def test_prose_about_prefill_says_what_the_rows_say() -> None:
    pages = ("README.md", "docs/turbo_attention.md", "docs/decode_step.md")
    readme, turbo, step = (" ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in pages)
    ours = "alspec.int8_prefill_attention"
    us = {
        (impl, tokens): medians_of("prefill_attention", impl=impl, tokens=tokens)
        for impl in ("torch.sdpa", "alspec.prefill_attention", ours, f"{ours}.sas")
        for tokens in (4096, 8192, 32768)
    }

    def speed(tokens: int, context: int, softmax: str = "", impl: str = ours, base: str = "torch.sdpa") -> str:
        return f"{us[base, tokens][context] / us[impl + softmax, tokens][context]:.2f}x"

    short, long, chunk = speed(8192, 8192), speed(32768, 32768), speed(4096, 32768)
    assert f"Against SDPA: {short} at 8K tokens and {long} at 32K" in turbo
    assert f"{chunk} for a chunk of 4096 after 28K" in turbo
    bf16 = "alspec.prefill_attention"
    assert f"and {speed(4096, 32768, base=bf16)} against what such a chunk takes over bf16" in turbo
    assert f"weights): {speed(4096, 32768, impl=bf16)} as fast as the kernel with a causal mask behind a prefix" in step
    assert f"run at {speed(8192, 8192, '.sas')} of SDPA with SAS and at {short} with exact" in turbo
    assert f"{short} of SDPA's speed on prompts of 8K tokens, {long} on 32K" in readme


PAGES = ["README.md", "models/demo/README.md", *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
FOLDERS = "alspec|docs|kernels|launch|models|runtime|tests"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Links to files and to headings of them, and every path of a file that is named."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], link
    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]+\.(?:py|jsonl|json\.gz|png|md)\b", text):
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_what_is_shown_names_no_folder_of_a_machine() -> None:
    """Rows and the trace have the commands that wrote them."""
    results = ROOT / "docs" / "results"
    files = [*results.glob("*.jsonl"), *results.glob("*.json.gz"), *(ROOT / page for page in PAGES)]
    for path in files:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work|mnt)/", text), path


def test_pages_are_looked_at() -> None:
    """The test above has pages, and finds in them what it looks for."""
    assert {"docs/lean_attention.md", "docs/results/README.md"} <= set(PAGES)
    assert re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]+\.py\b", "see `kernels/comm/ll_packets.py`.") == [
        "kernels/comm/ll_packets.py"
    ]


def test_prose_about_the_all_reduce_says_what_the_rows_say() -> None:
    rows = map(json.loads, (ROOT / "docs" / "results" / "allreduce.jsonl").read_text(encoding="utf-8").splitlines())
    of_one: dict[tuple[str, int], dict[str, float]] = {}
    of_eight: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        case = row["case"]
        if case["batch"] != 4 and "H100" in row["gpu"]:
            found = of_one if case["batch"] == 1 else of_eight
            found.setdefault((case.get("transport", "symm"), case["world"]), {})[row["impl"]] = row["us"]["p50"]
    name, nothing = "alspec.push, reduce_norm", of_one["symm", 4]["nothing: two empty launches"]
    page = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    four = of_one["symm", 4][name]
    assert f"takes {four:.1f} us each on four H100s, where two launches that do nothing take {nothing:.1f}" in page
    (peer, host), (nccl, peerless) = (
        [" and ".join(f"{of_one[way, world][impl]:.1f}" for world in (2, 4)) for way in ("symm", "host")]
        for impl in (name, "nccl")
    )
    assert f"written through peer pointers | {peer} us |" in page
    assert f"which the GPUs of all ranks map | {host} us |" in page
    assert f"to {host.split()[0]} us](experiments.md#decode-step) for an all-reduce of two H100s" in page
    ours, theirs = ([of_eight["host", world][impl] for world in (2, 4)] for impl in (name, "nccl"))
    said = f"takes {ours[0]:.1f} us on two H100s and {ours[1]:.1f} on four (NCCL {theirs[0]:.1f} and {theirs[1]:.1f});"
    assert said in page
    rates = [
        8 * 7 * (world - 1) * 4096 / (of_eight["host", world][name] - of_one["host", world][name]) / 1e3
        for world in (2, 4)
    ]
    assert f"what 8 requests have beyond one comes at {min(rates):.0f} GB/s." in page
    assert f"collectives are captured) | {nccl} us; without peer access {peerless} |" in page
