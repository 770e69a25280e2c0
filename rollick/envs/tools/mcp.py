"""Tools of an MCP server: a program that speaks JSON-RPC over stdin and stdout.

    initialize -> notifications/initialized -> tools/list -> tools/call, one at a time

Each environment process starts a server once, for all its episodes; it ends with the process. The
deadline of the environment's step limits each call.
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
    def __init__(self, command: str) -> None:
        self.command = command
        self._request_ids = count(1)
        self._lock = Lock()
        try:
            self._process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise EnvError(f"cannot start the MCP server {command!r}: {error}") from error
        client = {"capabilities": {}, "clientInfo": {"name": "rollick", "version": "1"}}
        self.request("initialize", {"protocolVersion": PROTOCOL, **client})
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[Tool]:
        return [self._tool(entry) for entry in self.request("tools/list", {})["tools"]]

    def request(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request. Raises EnvError if the server is gone or returns an error."""
        with self._lock:
            number = next(self._request_ids)
            self._send({"id": number, "method": method, "params": dict(parameters)})
            response = self._receive(number)
        if "error" in response:
            text = response["error"].get("message")
            raise EnvError(f"the MCP server returned an error for {method}: {text}")
        return response["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _tool(self, entry: Mapping[str, Any]) -> Tool:
        properties: Mapping[str, Any] = entry.get("inputSchema", {}).get("properties", {})
        parameters = {key: str(part.get("description", "")) for key, part in properties.items()}
        name, description = str(entry["name"]), str(entry.get("description", ""))
        return Tool(name, description, parameters, partial(self._call, name))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        result = self.request("tools/call", {"name": name, "arguments": dict(arguments)})
        parts = [part["text"] for part in result.get("content", ()) if part.get("type") == "text"]
        text = "\n".join(parts)
        return f"error: {text}" if result.get("isError") else text

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EnvError(f"the MCP server {self.command!r} exited") from error

    def _receive(self, number: int) -> dict[str, Any]:
        """The response to a request; ignores the server's other messages."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and message.get("id") == number:  # pyright: ignore[reportUnknownMemberType]
                return message  # pyright: ignore[reportUnknownVariableType]
        raise EnvError(f"the MCP server {self.command!r} exited before it responded")


mcp_server = lru_cache(16)(McpServer)
