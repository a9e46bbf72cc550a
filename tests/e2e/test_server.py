"""vLLM's API server with the flags that `stepwell vllm-args` prints, over HTTP; then other engines on the same well.

Page and block are vLLM's and our defaults. The tests form one story and run in this order.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepwell.demo.engine import ENVIRONMENT, START_LIMIT_S, end_session, log_tail, session_members
from stepwell.demo.wire import Question

from .wells import RECALL_ATTEMPTS, Well, config, eventually, in_one_process, recalled, receipt, start, warm_up

PROMPT, WHOLE = 530, 512
BLOCKS = 4
POOL = 8  # pages; a request takes 5
LOGPROBS = {"logprobs": 0}


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    cold: list[str] = field(default_factory=list)

    def post(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        common = {"model": "small", "temperature": 0, "ignore_eos": True, "max_tokens": 32}
        connection.request("POST", "/v1/completions", json.dumps(common | body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return connection, response

    def ask(self, prompt: list[int], **body: Any) -> dict[str, Any]:
        """Unstreamed."""
        connection, response = self.post({"prompt": prompt, **body})
        with closing(connection):
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def metric(self, name: str, **labels: str) -> float:
        """Of the server's own /metrics, whatever its other labels are."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
        [value] = [s.value for s in samples if labels.items() <= s.labels.items()]
        return value

    def stream(self, prompt: list[int]) -> tuple[str, int, int]:
        """Text, cached tokens and number of pieces."""
        connection, response = self.post({"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}})
        with closing(connection):
            pieces = list(events(response))
        text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
        return text, pieces[-1]["usage"]["prompt_tokens_details"]["cached_tokens"], len(pieces)


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def stepwell(*arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    command = [sys.executable, "-m", "stepwell", *arguments, "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 1
    answer: dict[str, Any] = json.loads(lines[0])
    return answer


@pytest.fixture(scope="module")
def server(model: Path, folder: Path, well: Well) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--num-gpu-blocks-override", str(POOL + 1), "--max-model-len", "1024"]
    command += ["--enable-prompt-tokens-details"]
    command += stepwell("vllm-args", "--home", str(well.home), "--host", "256MiB", "--receipts")["arguments"]
    began = time.monotonic()
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            command, stdout=log_file, stderr=log_file, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    try:
        while not healthy(port):
            assert process.poll() is None and time.monotonic() - began < START_LIMIT_S, log_tail(log)
            time.sleep(0.5)
        print(f"server up after {time.monotonic() - began:.1f} s")
        yield Server(process, port, log)
    finally:
        end_session(process.pid, lambda pid: True, 10)
        process.wait()


def healthy(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def prompts(texts: list[list[int]]) -> list[list[int]]:
    return [text[:PROMPT] for text in texts[:3]]


def test_cold_answers_stream(server: Server, well: Well, texts: list[list[int]], prompts: list[list[int]]) -> None:
    fillers = iter(texts[4:])

    def spills() -> bool:  # not before it knows the weights
        server.ask(next(fillers)[:200], max_tokens=1)
        return bool(well.home.is_dir() and well.stats()["spilled_blocks"])

    eventually(spills, "the engine spills")
    for prompt in prompts:
        text, cached, pieces = server.stream(prompt)
        assert cached == 0
        assert pieces > 8
        server.cold.append(text)


def test_recalled_answers_stream_and_say_so(server: Server, well: Well, prompts: list[list[int]]) -> None:
    streamed: dict[int, str] = {}
    said: dict[int, dict[str, Any]] = {}
    for _ in range(RECALL_ATTEMPTS):  # in turn: what is cached then was recalled, for the others pushed it out
        for number, prompt in enumerate(prompts):
            text, cached, _ = server.stream(prompt)
            if cached == WHOLE:
                streamed[number] = text
        for number, prompt in enumerate(prompts):
            answer = server.ask(prompt)
            if answer["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE:
                assert answer["kv_transfer_params"]["stepwell"]["recalled_tokens"] == WHOLE
                said[number] = answer
        if len(streamed) == len(said) == len(prompts):
            break
    for number, prompt in enumerate(prompts):
        assert said[number]["choices"][0]["text"] == streamed[number]
        server.ask(prompt, max_tokens=1)
        assert server.stream(prompt)[:2] == (streamed[number], WHOLE)  # an engine hit
    stats = stepwell("stats", "--home", str(well.home))
    print(stats)
    assert stats["sessions"] == 1
    assert stats["recalled_blocks"] >= 2 * len(prompts) * BLOCKS
    assert stats["misses_never_seen"] >= len(prompts) * BLOCKS
    assert server.metric("stepwell_engine_recalled_tokens_total", tier="host") >= 2 * len(prompts) * WHOLE
    assert server.metric("stepwell_engine_transfer_bytes_total", op="recall") == stats["recalled_bytes"]
    assert server.metric("stepwell_engine_recall_seconds_total") > 0


def test_clients_that_hang_up_leave_nothing(
    server: Server, well: Well, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    for prompt in [*prompts, texts[3][:PROMPT]] * 2:
        connection, response = server.post({"prompt": prompt, "stream": True, "max_tokens": 400})
        next(events(response))  # decoding
        connection.close()
    for prompt in [*prompts, texts[4][:PROMPT]]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"model": "small", "prompt": prompt, "max_tokens": 400, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.close()  # waiting, being recalled or computed
    eventually(well.is_idle, "nothing is held")
    for prompt in prompts:
        assert len(server.ask(prompt, max_tokens=4)["choices"][0]["text"]) > 0


def test_sigterm_ends_the_server_and_not_the_well(server: Server, well: Well) -> None:
    pid = well.pid()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    eventually(lambda: session_members(server.process.pid) == [], "the server's processes have ended")
    eventually(well.is_alone, "the server holds nothing")
    assert well.pid() == pid
    assert well.stats()["blocks"] >= BLOCKS


def test_another_engine_recalls_what_the_server_spilled(
    model: Path, folder: Path, well: Well, prompts: list[list[int]]
) -> None:
    with start(in_one_process(config(model, well.connector())), folder, "engine") as engine:
        # Knowing the weights and mapping slabs is all it may need before its first question.
        eventually(lambda: "joined well" in engine.log.read_text(), "the engine has joined")
        eventually(lambda: well.stats()["sessions"] == 1, "the session is complete")
        again, hit = recalled(engine, prompts[0], **LOGPROBS), engine.ask(prompts[0], 32, **LOGPROBS)
        assert (again.local_tokens, again.external_tokens) == (0, WHOLE)
        assert (hit.local_tokens, hit.external_tokens) == (WHOLE, 0)
        assert again.token_ids == hit.token_ids
        assert again.logprobs == hit.logprobs
    eventually(well.is_alone, "the engine holds nothing")


def test_a_model_of_the_same_name_with_other_weights_recalls_nothing(
    model: Path, folder: Path, well: Well, prompts: list[list[int]]
) -> None:
    other = folder / model.name
    shutil.copytree(model, other)
    change_one_value(other / "model.safetensors", "model.layers.0.self_attn.v_proj.weight")
    with start(in_one_process(config(other, well.connector())), folder, "other") as engine:
        warm_up(engine, 128)
        for prompt in prompts:
            first = engine.ask(prompt, 32, **LOGPROBS)
            assert (first.local_tokens, first.external_tokens) == (0, 0)
            assert receipt(first)["recalled_tokens"] == 0
        alone = engine.ask_all([Question(prompts[-1], 32, salt="nobody has asked this", sampling=LOGPROBS)])[0]
        assert (alone.local_tokens, alone.external_tokens) == (0, 0)
        assert (alone.token_ids, alone.logprobs) == (first.token_ids, first.logprobs)
        assert recalled(engine, prompts[0], 1).external_tokens == WHOLE  # its own
        engine.kill()  # quicker than to close it


def change_one_value(weights: Path, tensor: str) -> None:
    """The first element of a bfloat16 tensor becomes 3."""
    with weights.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, _ = json.loads(file.read(length))[tensor]["data_offsets"]
        file.seek(8 + length + begin)
        file.write(bytes.fromhex("4040"))
