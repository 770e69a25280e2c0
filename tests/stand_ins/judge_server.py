"""An OpenAI-compatible judge endpoint: its score is a deterministic function of the response.

python judge_server.py HOST PORT
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RESPONSE = re.compile(r"<<<(\w+) RESPONSE\n(.*)\n\1 RESPONSE>>>", re.DOTALL)


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        system, data = (message["content"] for message in request["messages"])
        seal, response = re.search(r'"seal": "(\w+)"', system), RESPONSE.search(data)
        assert seal is not None
        assert response is not None
        score = sum(map(ord, response[2])) % 11
        verdict = json.dumps({"reason": "", "score": score, "seal": seal[1]})
        body = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Judge).serve_forever()
