"""An agent without any rollick code: it asks a model twice and prints the second answer.

Name it in a recipe as `agent: agent.py`, or run it by hand with OPENAI_BASE_URL, OPENAI_API_KEY and
ROLLICK_TASK='{"prompt": "What is 17 + 25?"}'. Its standard output is the answer.
"""

import json
import os

from openai import OpenAI

task = json.loads(os.environ["ROLLICK_TASK"])
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": task["prompt"]}]
for question in (None, "Check it, and give only the result."):
    if question is not None:
        messages.append({"role": "user", "content": question})
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=32)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
print(messages[-1]["content"])
