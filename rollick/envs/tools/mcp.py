"""Tools of an MCP server: a program that speaks JSON-RPC over its standard streams.

    initialize -> notifications/initialized -> tools/list -> tools/call, one at a time

A server is started once in a process of environments and serves all its episodes; it ends with that
process. Who waits too long for it is ended by the deadline of the environment's step.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import count
from threading import Lock
from typing import Any

from rollick.envs.tools.kit import Tool
from rollick.errors import EnvError

PROTOCOL = "2025-06-18"


class McpServer:
    """A running server."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._numbers = count(1)
        self._busy = Lock()
        try:
            self._process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise EnvError(f"the MCP server {command!r} cannot be started: {error}") from error
        about = {"name": "rollick", "version": "1"}
        self.ask(
            "initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about}
        )
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def tools(self) -> list[Tool]:
        """What it offers."""
        return [self._tool(entry) for entry in self.ask("tools/list", {})["tools"]]

    def ask(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call. EnvError where the server is gone or answers with an error."""
        with self._busy:
            number = next(self._numbers)
            self._send(
                {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(parameters)}
            )
            answer = self._receive(number)
        if "error" in answer:
            raise EnvError(f"the MCP server refuses {method}: {answer['error'].get('message')}")
        return answer["result"]

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _tool(self, entry: Mapping[str, Any]) -> Tool:
        properties: Mapping[str, Any] = entry.get("inputSchema", {}).get("properties", {})
        about = {name: str(part.get("description", "")) for name, part in properties.items()}
        name = str(entry["name"])
        return Tool(name, str(entry.get("description", "")), about, partial(self._call, name))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        result = self.ask("tools/call", {"name": name, "arguments": dict(arguments)})
        parts = [part["text"] for part in result.get("content", ()) if part.get("type") == "text"]
        text = "\n".join(parts)
        return f"error: {text}" if result.get("isError") else text

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EnvError(f"the MCP server {self.command!r} is gone") from error

    def _receive(self, number: int) -> dict[str, Any]:
        """The answer to a call; what the server says meanwhile of its own accord is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and message.get("id") == number:  # pyright: ignore[reportUnknownMemberType]
                return message  # pyright: ignore[reportUnknownVariableType]
        raise EnvError(f"the MCP server {self.command!r} ended without an answer")


@lru_cache(16)
def mcp_server(command: str) -> McpServer:
    """The server of a command, started once in this process."""
    return McpServer(command)
