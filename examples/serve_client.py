"""Talk to `rollick serve MODEL` with the openai package: python examples/serve_client.py URL TOKEN

The server prints both. This requests one answer, one streamed answer, and then records a
conversation as the token-exact segments that training uses.
"""

import sys

import httpx
from openai import OpenAI

url, token = sys.argv[1:]
client = OpenAI(base_url=url, api_key=token)
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 2 + 3?"}],
    max_tokens=32,
    temperature=0,
)
print(answer.choices[0].message.content, answer.usage)

for chunk in client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Count to five."}],
    max_tokens=32,
    stream=True,
):
    print(chunk.choices[0].delta.content, end="", flush=True)
print()

# An agent only needs the session's base URL and token.
server = httpx.Client(
    base_url=url.removesuffix("/v1"), headers={"Authorization": f"Bearer {token}"}
)
session = server.post("/sessions").json()
agent = OpenAI(base_url=session["base_url"], api_key=session["token"])
messages = []
for question in ("Name a colour.", "And another one?"):
    messages.append({"role": "user", "content": question})
    reply = agent.chat.completions.create(model=model, messages=messages, max_tokens=16)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})

for segment in server.delete(f"/sessions/{session['id']}").json()["segments"]:
    trained = sum(segment["loss_mask"])
    print(f"{segment['turns']} turns, {len(segment['token_ids'])} tokens, {trained} to train on")
