"""Requests in the shapes that clients' sources give them, for a template that is strict:
one system message, in front; a question of the user; calls through the items of their arguments.

Each has what its client is known to add: unknown fields and kinds, blanks for nothing, late system
messages, calls without ids, thoughts under a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from served import app_of, scripted_lm, serving
from tool_templates import STRICT

SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string", "description": "where"}, "limit": {"type": "number"}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
SYSTEM, GO = {"role": "system", "content": "You edit files."}, {"role": "user", "content": "Go on."}
ASKED = {"role": "user", "content": [{"type": "text", "text": "Read it."}]}


def called(arguments: str = '{"path": "a.py"}', **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "print(1)"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REMINDER = {"type": "text", "text": "<system-reminder>\nNo todos.\n</system-reminder>"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "messages": [
        {"role": "user", "content": [REMINDER, {"type": "text", "text": "Read it.", **CACHED}]},
        {"role": "system", "content": [{"type": "text", "text": "Agents: explorer, planner."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Let me see.", "signature": "EqQBCg=="},
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.png"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "image", "source": {"type": "base64", "data": "AA"}}],
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "tool_reference", "tool_name": "mcp__a__b"}],
                    "is_error": False,
                },
                {"type": "text", "text": "[Request interrupted by user for tool use]", **CACHED},
            ],
        },
        {"role": "system", "content": "A hook says: green."},
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_session_2"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "speed": "fast",
}
COUNT = {k: v for k, v in CLAUDE_CODE.items() if k not in ("max_tokens", "stream")}
CODEX = {
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>ask</permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Let me see."}],
            "content": None,
            "encrypted_content": "gAAAAA",
        },
        {"type": "function_call", "name": "shell", "arguments": '{"command', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "aborted by user"},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "c2",
            "name": "apply_patch",
            "input": "*** Begin Patch",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done!"},
        {
            "type": "local_shell_call",
            "call_id": "c3",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "timeout_ms": None},
        },
        {
            "type": "function_call_output",
            "call_id": "c3",
            "output": [
                {"type": "input_text", "text": "a.py"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA"},
            ],
        },
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "1"}},
        {"type": "compaction", "encrypted_content": "gAAAAA"},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Done."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "More"}]},
    ],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "tools": []},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
HOME = {"role": "tool", "content": '{"data":{"light":"on"},"error":null}'}
HOME_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "TurnOn", "arguments": {"area": "hall"}}}],
}
CHAT, CLAUDE = "/v1/chat/completions", {"anthropic-version": "2023-06-01", "x-app": "cli"}
# name -> (path, headers, body)
REQUESTS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "Claude Code": ("/v1/messages?beta=true", CLAUDE, CLAUDE_CODE),
    "Claude Code, count": ("/v1/messages/count_tokens?beta=true", CLAUDE, COUNT),
    "Codex": ("/v1/responses", {"originator": "codex_cli_rs"}, CODEX),
    "Open WebUI": (
        CHAT,
        {},
        {
            **STREAM,
            "messages": [SYSTEM, ASKED, {"role": "assistant", "content": ""}, GO],
            "params": {"function_calling": "native"},
            "features": {"web_search": False},
            "session_id": "1",
            "background_tasks": {"title_generation": True},
            "tool_ids": None,
        },
    ),
    "Open WebUI, Continue Response": (
        CHAT,
        {},
        {"messages": [SYSTEM, ASKED, {"role": "assistant", "content": "It pri"}], "stream": True},
    ),
    "Continue": (
        CHAT,
        {},
        {
            "messages": [SYSTEM, GO, {**called(), "content": " "}, {**RESULT, "content": ""}],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": None}}],
            "stream": True,
            "prediction": None,
            "stop": [],
        },
    ),
    "aider": (
        CHAT,
        {},
        {
            "messages": [
                SYSTEM,
                GO,
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "I changed it."},
                SYSTEM,
                {"role": "assistant", "content": "def f():", "prefix": True},
            ],
            "temperature": 0,
            "stream": True,
        },
    ),
    "LiteLLM": (
        CHAT,
        {},
        {
            "messages": [
                GO,
                called(
                    "",
                    function_call=None,
                    provider_specific_fields={"refusal": None},
                    thinking_blocks=[{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
                ),
                RESULT,
            ],
            "tools": [TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "extra_body": {},
        },
    ),
    "Cline": (
        CHAT,
        {"HTTP-Referer": "https://cline.bot"},
        {
            **STREAM,
            "messages": [
                {"role": "developer", "content": "You edit files."},
                ASKED,
                called(
                    '{"path": "a.p',
                    reasoning_details=[{"type": "reasoning.text", "text": "Hm.", "index": 0}],
                ),
                {**RESULT, "content": "(see following user message for image)"},
                {"role": "user", "content": [{"type": "text", "text": "<environment/>"}]},
            ],
            "temperature": 0,
            "reasoning_effort": "medium",
            "tools": [TOOL],
        },
    ),
    "opencode": (
        CHAT,
        {"User-Agent": "ai-sdk/openai-compatible"},
        {
            **STREAM,
            "messages": [SYSTEM, SYSTEM, ASKED, called(reasoning_content="Hm."), RESULT, ASKED],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_tokens": 32000,
            "top_p": 1,
        },
    ),
    "LibreChat": (
        CHAT,
        {},
        {
            **STREAM,
            "messages": [
                GO,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "think", "think": "Hm."},
                        {"type": "text", "text": "Yes.", "tool_call_ids": []},
                        {"type": "error", "error": "it broke"},
                    ],
                },
                SYSTEM,
                GO,
            ],
            "user": "65f",
            "include_reasoning": True,
            "resendFiles": True,
        },
    ),
    "Copilot": (
        CHAT,
        {},
        {
            "messages": [SYSTEM, GO, called(reasoning_text="Hm.", reasoning_opaque="x"), RESULT],
            "tools": [TOOL],
            "n": 1,
            "copilot_cache_control": {"type": "ephemeral"},
        },
    ),
    "Zed": (
        CHAT,
        {},
        {
            **STREAM,
            "messages": [SYSTEM, ASKED, called(content=[]), {**RESULT, "content": []}, ASKED],
            "max_completion_tokens": 4096,
            "parallel_tool_calls": False,
            "prompt_cache_key": "1",
            "tools": [TOOL],
            "tool_choice": "auto",
        },
    ),
    "Home Assistant": (
        "/api/chat",
        {},
        {
            "messages": [SYSTEM, HOME, HOME_CALL, HOME, {"role": "user", "content": "And?"}],
            "tools": [{"type": "function", "function": {"name": "TurnOn", "parameters": SCHEMA}}],
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 8192},
            "think": False,
            "format": None,
        },
    ),
    "SillyTavern, a greeting first": (
        CHAT,
        {},
        {
            "messages": [SYSTEM, {"role": "assistant", "content": "Hello."}, SYSTEM],
            "add_generation_prompt": True,
            "include_reasoning": True,
            "enable_thinking": False,
        },
    ),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    lm = scripted_lm({"Go on.": "Yes."})
    lm.tokenizer.chat_template = STRICT
    with serving(app_of({"m": lm})) as found:
        yield found


@pytest.mark.parametrize("name", REQUESTS)
def test_a_clients_request_is_answered(address: str, name: str) -> None:
    path, headers, body = REQUESTS[name]
    found = httpx.post(address + path, json={"model": "m", **body}, headers=headers, timeout=60)
    assert found.status_code == 200, found.text
    assert '"error"' not in found.text.replace('"error":null', "") and found.text
    if "count" in path:
        assert found.json()["input_tokens"] > 100
