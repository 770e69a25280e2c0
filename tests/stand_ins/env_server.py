"""A server with the protocol of openenv: an episode has three steps, each with its own reward.

python env_server.py HOST PORT
"""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

SCHEMA = {"action": {"title": "Say", "required": ["text"], "properties": {"text": {}}}}


def play(connection: ServerConnection) -> None:
    steps = 0
    for message in connection:
        request = json.loads(message)
        text: str = request["data"].get("text", "")
        steps = 0 if request["type"] == "reset" else steps + 1
        data = {
            "observation": {"text": f"step {steps}"},
            "reward": sum(map(ord, text)) % 7 / 7,
            "done": steps == 3,
        }
        if text.startswith("hang"):  # The connection stays open, without a reply.
            continue
        connection.send(json.dumps({"type": "observation", "data": data}))


def give_schema(connection: ServerConnection, request: Request) -> Response | None:
    if request.path != "/schema":
        return None
    return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA))


def listen(host: str, port: int, **options: Any) -> Server:
    return serve(play, host, port, process_request=give_schema, **options)


if __name__ == "__main__":
    with listen(sys.argv[1], int(sys.argv[2])) as server:
        server.serve_forever()
