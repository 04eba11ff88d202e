"""Forks of a process that holds engines, and its exit while they are busy, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, os, signal, sys, warnings
import torch
from cacheslide_agents.adapters.langchain import CacheSlideChat
from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import EngineClosedError
from tests.adapters.tiny_llm import tiny_settings
from tests.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on a fork of a process with threads warns
long = SamplingParams(max_tokens=2000, ignore_eos=True)
prompt = Prompt([Segment.suffix("hello there")])
engine = Engine.from_model(tiny_model(), tiny_tokenizer(None), EngineConfig(pool_tokens=8192))
chat = CacheSlideChat(**tiny_settings())
answer = chat.invoke("hi").text
stream = engine.stream(prompt, long)
next(stream)
child = os.fork()
if child == 0:
    signal.alarm(60)
    for call in (lambda: engine.generate(prompt), lambda: engine.stats() and next(stream)):
        try:
            call()
        except EngineClosedError as error:
            assert "fork" in str(error)
        else:
            sys.exit(2)
    engine.close()
    sys.exit(0 if chat.invoke("hi").text == answer else 3)
assert os.waitpid(child, 0)[1] == 0
assert next(stream).token_ids

async def leave() -> None:
    for number in range(3):
        asyncio.create_task(engine.agenerate(prompt, long, session=str(number)))
    await asyncio.sleep(0.1)

asyncio.run(leave())
waiting = [engine.stream(prompt, long) for _ in range(3)]
print("left")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_process_exits_quietly_and_forks_load_their_own_engine_when_engines_are_busy(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "CACHESLIDE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
