"""`bitnet-ops serve [MODEL]`: an HTTP server with OpenAI's, Anthropic's and Ollama's interfaces.

Everything of the server's own stands in bitnet_ops.server; here are its options.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet_ops import machine
from bitnet_ops.cli.arguments import UsageError, integer, non_empty, number
from bitnet_ops.cli.generate import (
    MODEL_HELP,
    add_model_arguments,
    add_speculation,
    check_draft,
    open_model,
)
from bitnet_ops.cli.pictures import (
    add_picture_arguments,
    check_picture_arguments,
    note_missing_pillow,
)
from bitnet_ops.cli.terminal import say
from bitnet_ops.errors import BitNetError, install
from bitnet_ops.generate.draft_choice import check_draft_head

if TYPE_CHECKING:
    from bitnet_ops.language_model import LanguageModel
    from bitnet_ops.vision.sources import ImageSources


_SHORTEST_KEY = 8


class ServerMissingError(BitNetError, RuntimeError):
    """The packages of the extra `server` are not installed."""

    code = "server"


class ServeError(BitNetError, RuntimeError):
    """An address that cannot be served, or may not be."""

    code = "serve"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.usage = "bitnet-ops serve [MODEL] [options]"
    parser.description = (
        "Serve models on this machine: a page to talk on, and the HTTP interfaces of OpenAI, "
        f"Anthropic and Ollama. Needs the extra `server`: {install('server')}"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", type=non_empty, help="address to bind (default 127.0.0.1)")
    add("--port", type=integer(0, 65535), default=8080, help="default 8080; 0 takes a free one")
    add(
        "--model",
        action="append",
        default=[],
        dest="models",
        type=non_empty,
        metavar="NAME=MODEL",
        help="serve another model under this name; repeatable",
    )
    add(
        "--adapter",
        action="append",
        default=[],
        type=non_empty,
        metavar="NAME=DIR",
        help="serve a LoRA adapter of the first model under this name; repeatable",
    )
    add(
        "--api-key-file",
        metavar="FILE",
        type=non_empty,
        help="keys, one a line, of which every request brings one",
    )
    add(
        "--any-model",
        action="store_true",
        help="answer requests for unknown models with the first one",
    )
    add(
        "--max-running",
        type=integer(1, 1024),
        default=32,
        metavar="N",
        help="answers at once (default 32)",
    )
    add(
        "--max-waiting",
        type=integer(0, 10**6),
        default=128,
        metavar="N",
        help="answers that may wait beside them (default 128); others get 429",
    )
    add("--max-per-client", type=integer(1), metavar="N", help="answers of one key or address")
    add("--max-tokens", type=integer(1), metavar="N", help="of one answer, at most")
    add(
        "--request-time",
        type=number("above 0", lambda v: v > 0),
        default=3600.0,
        metavar="S",
        help="the longest that a request may take (default 3600)",
    )
    add(
        "--drain",
        type=number("at least 0", lambda v: v >= 0),
        default=30.0,
        metavar="S",
        help="seconds that answers have after SIGTERM (default 30)",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name in Host beside localhost; repeatable",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a page that may ask, as https://example.org, or *; repeatable",
    )
    add(
        "--prefix-dir",
        type=non_empty,
        metavar="DIR",
        help="keep the prefix cache there too, so that it survives a restart",
    )
    add(
        "--prefix-dir-mb",
        type=number("above 0", lambda v: v > 0),
        default=4096.0,
        metavar="MB",
        help="the most that it may take (default 4096)",
    )
    add("--log-requests", action="store_true", help="a line a request on stderr, without prompts")
    add_speculation(parser)
    _add_picture_arguments(parser)
    add_model_arguments(parser)


def _add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_picture_arguments(parser).add_argument
    add(
        "--images-per-request",
        type=integer(1, 1024),
        metavar="N",
        help="at most, history included (default 16)",
    )
    add(
        "--image-host",
        action="append",
        default=[],
        type=non_empty,
        dest="image_hosts",
        metavar="HOST",
        help="fetch pictures of requests from there, by https; .HOST: and below it; repeatable",
    )
    add(
        "--image-folder",
        type=non_empty,
        metavar="DIR",
        help="read pictures that requests name by file:, from this folder alone",
    )


def check(args: argparse.Namespace) -> None:
    """Reject a public address without a key, names that are taken, hosts that are none."""
    check_picture_arguments(args)
    check_draft(args)
    if args.image_hosts or args.image_folder is not None:
        _sources(args)
    args.named = _named(args)
    args.adapters = dict(_pair("--adapter", "NAME=DIR", text) for text in args.adapter)
    if taken := [name for name in args.adapters if name in args.named]:
        raise UsageError(f"serve: expected other names of adapters than of models, got {taken[0]}")
    if args.api_key_file is None and not machine.is_loopback(args.host):
        raise UsageError(
            f"serve: expected --api-key-file for an address that others reach, got {args.host} "
            "without one; write a long random key into a file, or bind 127.0.0.1"
        )


def _sources(args: argparse.Namespace) -> ImageSources:
    """What pictures may be fetched from. Raises UsageError for what cannot be."""
    from bitnet_ops.vision.sources import ImageSources

    folder = None if args.image_folder is None else Path(args.image_folder).expanduser()
    try:
        return ImageSources(allowed_hosts=tuple(args.image_hosts), allowed_folder=folder)
    except ValueError as error:
        wrong = str(error).removeprefix("images: ")
        option = "--image-folder" if "folder" in wrong else "--image-host"
        raise UsageError(f"serve: {option}: {wrong}") from None


def _named(args: argparse.Namespace) -> dict[str, str | None]:
    """The models by name: the one in front, or the demo, and those of --model."""
    named: dict[str, str | None] = {}
    if args.model is not None or not args.models:
        named[name_of(args.model)] = args.model
    for text in args.models:
        name, path = _pair("--model", "NAME=MODEL", text)
        if name in named:
            raise UsageError(f"serve: expected different names of models, got {name} twice")
        named[name] = path
    return named


def _pair(option: str, form: str, text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise UsageError(f"serve: expected {option} {form}, got {text!r}")
    return name, path


def name_of(path: str | None) -> str:
    """The name of a model that was given without one: the last part of its path."""
    if path is None:
        return "demo"
    found = Path(path)
    stem = found.resolve().parent.name if found.name == "model.bin" else found.name
    return re.sub(r"\.(gguf|bin|safetensors)$", "", stem) or "model"


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. What was named wrongly is said before anything is promised."""
    from bitnet_ops.loading.resolve import check_name
    from bitnet_ops.nn.lora import read_adapter

    needed = "fastapi", "uvicorn", "httptools", "llguidance", "prometheus_client"
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ServerMissingError(
            f"serve: expected the packages of the server, got no {', '.join(missing)}; run: "
            f"{install('server')}"
        )
    keys = _keys(args.api_key_file)
    for path in args.named.values():
        if path is not None:
            check_name(path, convert=args.convert)
    for folder in [*args.adapters.values(), *([args.lora] if args.lora else [])]:
        read_adapter(folder)
    listener = _listener(args.host, args.port)
    # now that nothing is wrong: FastAPI takes half a second to import
    from bitnet_ops.server.run import serve

    host, port = listener.getsockname()[:2]
    shown = "localhost" if machine.is_loopback(args.host) else args.host
    address = f"http://{f'[{host}]' if ':' in host and shown == host else shown}:{port}/"
    began = time.perf_counter()

    models: dict[str, LanguageModel] = {}

    def load() -> dict[str, LanguageModel]:
        models.update(_load(args))
        return models

    def ready(names: Sequence[str]) -> None:
        seconds = time.perf_counter() - began
        seeing = {name for name, lm in models.items() if lm.images is not None}
        shown = (f"{name} (reads pictures)" if name in seeing else name for name in names)
        say(f"ready after {seconds:.1f} s | models: {', '.join(shown)} | {address}")

    say(f"loading; then {address} has a page to talk on, {address}v1 is the address for clients")
    return serve(
        listener,
        load,
        args.adapters,
        ready,
        keys=keys,
        hosts=[args.host, *args.allow_host],
        any_host=not machine.is_loopback(args.host) and not args.allow_host,
        origins=args.allow_origin,
        any_model=args.any_model,
        sources=_sources(args),
        drain_s=args.drain,
        log_requests=args.log_requests,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        max_per_client=args.max_per_client,
        max_tokens=args.max_tokens,
        request_s=args.request_time,
        speculation=args.speculation,
    )


def _load(args: argparse.Namespace) -> dict[str, LanguageModel]:
    """Open the models; without a word on memory each gets its share."""
    if args.kv_cache_mb is None and len(args.named) > 1:
        args.kv_cache_mb = machine.cache_budget() / len(args.named) / 2**20
    disk = {"prefix_dir": args.prefix_dir, "prefix_dir_mb": args.prefix_dir_mb}
    models, mmproj = {}, args.mmproj
    for name, path in args.named.items():
        models[name] = open_model(path, args, **disk, mmproj=mmproj)
        check_draft_head(
            args.speculation, models[name].model, f"serve: {name}: expected --speculation"
        )
        mmproj = None  # it is the first model's
    first = next(iter(models.values()))
    for lm in models.values():
        note_missing_pillow(lm)
    for name, folder in args.adapters.items():
        first.add_adapter(name, folder)
    return models


def _keys(file: str | None) -> list[str]:
    """The keys of a file, one a line; # begins a remark."""
    if file is None:
        return []
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ServeError(f"serve: expected --api-key-file to be readable, got: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or min(map(len, keys)) < _SHORTEST_KEY:
        raise ServeError(
            f"serve: expected keys of at least {_SHORTEST_KEY} characters in {file}, one a line, "
            f"got {'a shorter one' if keys else 'none'}; run: openssl rand -hex 24 > {file}"
        )
    return keys


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "; another program listens there: choose another --port (0: a free one)"
        else:
            remedy = ""
        raise ServeError(
            f"serve: expected to bind {host} port {port}, got: {error.strerror or error}{remedy}"
        ) from None
