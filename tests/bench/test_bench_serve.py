"""`bitnet-ops bench serve`: it asks a real server of the demo, and says where answers differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bitnet_ops
from bitnet_ops import cli
from bitnet_ops.bench import serve

SMALL = serve.ServeSettings(
    streams=(2,),
    stream_tokens=(8, 8),
    rates=(20.0,),
    requests=6,
    system_tokens=40,
    prompt_tokens=(4, 9),
    new_tokens=(3, 8),
)


def test_a_report_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "report.json", tmp_path / "firsts.png"
    words = "bench serve --streams 2 --rates 20 --requests 6 --system-tokens 40 --prompts 4,9"
    words += f" --answers 3,8 --plot {picture} --output {file}"
    assert cli.main(words.split()) == 0
    shown, report = capsys.readouterr().out, json.loads(file.read_text())
    assert report["schema"] == "bitnet_ops.bench.serve" and report["ok"]
    (streams,), (arrivals,) = report["streams"], report["arrivals"]
    assert streams["streams"] == 2 and streams["same"] and arrivals["same"]
    assert streams["engine_s"] > 0 and streams["served_s"] > 0
    assert arrivals["answered"] == arrivals["requests"] == 6 and not arrivals["turned_away"]
    assert len(arrivals["firsts_s"]) == 6
    assert arrivals["first_ms"]["p50"] <= arrivals["first_ms"]["p99"] <= arrivals["whole_ms"]["p99"]
    assert shown.count("yes") == 2 and "NO" not in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["streams", "arrivals"])
def test_an_answer_that_differs_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrivals the second asking gives another text: as if load had changed the first."""
    ask, asked = serve.ask, []

    async def other(address: str, body: dict[str, Any]) -> serve.Reply:
        reply = await ask(address, body)
        asked.append(body["seed"])
        if kind == "streams" or len(asked) > SMALL.requests:
            reply.text += "!"
        return reply

    monkeypatch.setattr(serve, "ask", other)
    with_streams = kind == "streams"
    settings = serve.ServeSettings(
        **{
            **vars(SMALL),
            "streams": SMALL.streams if with_streams else (),
            "rates": () if with_streams else SMALL.rates,
        }
    )
    report = serve.run(settings, bitnet_ops.load, lambda line: None)
    assert not report["ok"] and not report[kind][0]["same"]
    assert "NO" in "\n".join(serve.lines(report))


def test_pieces_have_the_time_of_the_part_that_ends_them() -> None:
    def event(text: str, usage: int = 0) -> bytes:
        value: dict[str, Any] = {"choices": [{"text": text}]}
        if usage:
            value["usage"] = {"completion_tokens": usage}
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    head = b"HTTP/1.1 200 OK\r\na: b\r\n\r\n"
    first, second, third = event("a"), event("b"), event("", 2)
    whole = head + first + second + third
    cut = len(head) + len(first) + 5  # in the middle of the second
    reply = serve._read(whole, [(len(head) + 2, 0.1), (cut, 0.2), (len(whole), 0.5)])
    assert reply.text == "ab" and reply.tokens == 2 and reply.times == [0.2, 0.5]
    assert reply.first_s == 0.2 and reply.seconds == 0.5
    refused = serve._read(b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy", [(40, 0.3)])
    assert refused.status == 429 and refused.text == "busy" and refused.first_s == 0.3


def test_a_server_that_does_not_start_is_one_error() -> None:
    settings = serve.ServeSettings(options=("--max-running", "nonsense"))
    with pytest.raises(
        serve.BenchServeError, match="expected a server that starts, got: .*max-run"
    ):
        with serve.server(settings):
            pass
