"""Run by an interpreter that has the openai and anthropic clients: talks to a gateway, prints what it got as JSON."""

import json
import sys

import anthropic
import openai

url, model, question, stop = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
asked = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}
got: dict[str, object] = {}


def usage(value) -> list[int]:
    return [value.prompt_tokens, value.completion_tokens]


answer = client.chat.completions.create(**asked)
choice = answer.choices[0]
got["chat"] = {"text": choice.message.content, "finish": choice.finish_reason, "usage": usage(answer.usage)}

pieces, finish, counted = [], None, None
for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
    counted = event.usage or counted
    for choice in event.choices:
        pieces.append(choice.delta.content or "")
        finish = choice.finish_reason or finish
got["chat stream"] = {"text": "".join(pieces), "finish": finish, "usage": usage(counted)}

answer = client.chat.completions.create(**{**asked, "temperature": 1.0}, n=2, seed=5)
again = client.chat.completions.create(**{**asked, "temperature": 1.0}, n=2, seed=5)
got["n"] = [sorted((choice.index, choice.message.content) for choice in one.choices) for one in (answer, again)]
got["n usage"] = usage(answer.usage)

indices = {0: "", 1: ""}
for event in client.chat.completions.create(**{**asked, "temperature": 1.0}, n=2, seed=5, stream=True):
    for choice in event.choices:
        indices[choice.index] += choice.delta.content or ""
got["n stream"] = sorted(indices.items())

answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
got["logprobs"] = [
    [entry.token, entry.logprob, [[top.token, top.logprob] for top in entry.top_logprobs]]
    for entry in answer.choices[0].logprobs.content
]

answer = client.chat.completions.create(**asked, stop=[stop])
choice = answer.choices[0]
got["stop"] = {"text": choice.message.content, "finish": choice.finish_reason, "usage": usage(answer.usage)}

plain = {"model": model, "prompt": question, "max_tokens": 8, "temperature": 0}
answer = client.completions.create(**plain)
got["completion"] = {"text": answer.choices[0].text, "usage": usage(answer.usage)}
stream = client.completions.create(**plain, stream=True)
got["completion stream"] = "".join(choice.text for event in stream for choice in event.choices)

try:
    client.completions.create(**{**plain, "prompt": "word " * 9000})
except openai.APIStatusError as error:
    got["refused"] = [error.status_code, str(error)]

messages = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120).messages
asked.pop("temperature")
spoken = {**asked, "extra_body": {"temperature": 0.0}}
answer = messages.create(**spoken)
got["message"] = {
    "text": answer.content[0].text,
    "finish": answer.stop_reason,
    "usage": [answer.usage.input_tokens, answer.usage.output_tokens],
}
with messages.stream(**spoken) as stream:
    got["message stream"] = "".join(stream.text_stream)
print(json.dumps(got))
