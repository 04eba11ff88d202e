"""Time to the first token on a GPU: random weights of Mistral-7B's geometry at 8,000 tokens, against the floors.

`python -m benchmarks.gpu`. The floor of a request is the larger of two times: its operations at the device's measured
matrix speed, and its bytes (weights read once, K and V read and written) at its measured copy speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, Receipt, SamplingParams, Segment

SIZES = {"system": 1024, "old update": 512, "new update": 768, "suffix": 6144, "query": 64}
GEOMETRY: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "recompute"},
    "prefix": {"policy": "prefix"},
    "slide, no correction": {"policy": "slide", "correction_share": 0.0},
    "head, 10 % corrected": {"policy": "head", "correction_share": 0.10},
    "slide": {"policy": "slide"},
}


def main() -> int:
    """Prints one line a policy; writes JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shrink", type=int, default=1, help="divide every size, to try the script on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = _random_model(device, arguments.shrink)
    speeds = _measured_speeds(device, arguments.shrink)
    figures: dict[str, Any] = {"device": _name(device), "speeds": speeds, "policies": {}}
    base = EngineConfig(
        pool_tokens=65536 // arguments.shrink, attention=arguments.attention, repair=False, gate_share=0.0
    )
    for name, changes in SETTINGS.items():
        with Engine.from_model(model, words_tokenizer(), base.with_changes(**changes)) as engine:
            receipts = [_second_turn(engine, repeat, arguments.shrink) for repeat in range(arguments.repeats + 1)][1:]
        floors = _floors(model, receipts[0], speeds)
        seconds = median(receipt.ttft_seconds for receipt in receipts)
        figures["policies"][name] = {
            "ttft_seconds": seconds,
            "computed_tokens": receipts[0].computed_tokens,
            "prompt_tokens": receipts[0].prompt_tokens,
            **floors,
        }
        floor = max(floors.values())
        print(
            f"{name:24} {seconds * 1e3:9.2f} ms  computed {receipts[0].computed_tokens:5} of "
            f"{receipts[0].prompt_tokens}  floor {floor * 1e3:8.2f} ms  {seconds / floor:5.2f} x",
            flush=True,
        )
    print(json.dumps({key: figures[key] for key in ("device", "speeds")}))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a word, `w0` to `w999`, so that prompts have the wanted token counts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, **{f"w{number}": number + 1 for number in range(1000)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    build: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = build(tokenizer_object=tokenizer, unk_token="<unk>")
    return wrapped


def _random_model(device: torch.device, shrink: int) -> MistralForCausalLM:
    geometry = dict(GEOMETRY)
    if shrink > 1:
        geometry |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
        geometry |= {"num_key_value_heads": 2}
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = MistralForCausalLM(MistralConfig(**geometry))
    finally:
        torch.set_default_dtype(default)
    model.eval().requires_grad_(False)
    return model


def _second_turn(engine: Engine, repeat: int, shrink: int) -> Receipt:
    def words(name: str, offset: int) -> str:
        count = SIZES[name] // shrink
        return " ".join(f"w{(number * 7 + offset + 131 * repeat) % 1000}" for number in range(count)) + " "

    session = str(repeat)
    system, suffix = Segment.system(words("system", 0)), Segment.suffix(words("suffix", 3))
    first = Prompt([system, Segment.update(words("old update", 1)), suffix])
    second = Prompt([system, Segment.update(words("new update", 2)), suffix, Segment.suffix(words("query", 5))])
    engine.generate(first, SamplingParams(max_tokens=1), session=session)
    receipt = engine.generate(second, SamplingParams(max_tokens=1), session=session).receipt
    engine.forget(session)
    return receipt


def _measured_speeds(device: torch.device, shrink: int) -> dict[str, float]:
    """Operations per second of a large bfloat16 product, and bytes per second of a copy (read plus written)."""
    size = 8192 // shrink
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31 // shrink**2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _seconds(lambda: a @ b, device)
    copy = _seconds(lambda: target.copy_(source), device)
    return {"operations": 2 * size**3 / product, "bytes": 2 * len(source) / copy}


def _seconds(call: Any, device: torch.device) -> float:
    times = []
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _floors(model: MistralForCausalLM, receipt: Receipt, speeds: dict[str, float]) -> dict[str, float]:
    """Seconds that the operations and the bytes of a request take at the measured speeds."""
    config: Any = model.config
    weights = sum(parameter.numel() for parameter in model.model.layers.parameters())
    head = config.vocab_size * config.hidden_size
    computed, total = receipt.computed_tokens, receipt.prompt_tokens
    pairs = sum(
        (stop - start) * (start + stop + 1) / 2
        for start, stop, treatment in receipt.treatments
        if treatment in ("fresh", "corrected")
    )
    operations = 2 * weights * computed + 2 * head + 4 * config.num_hidden_layers * config.hidden_size * pairs
    kv_width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    token_bytes = 2 * 2 * config.num_hidden_layers * kv_width
    moved = 2 * receipt.slid_tokens * token_bytes
    return {
        "operations_seconds": operations / speeds["operations"],
        "bytes_seconds": (2 * (weights + head) + moved + total * token_bytes) / speeds["bytes"],
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    sys.exit(main())
