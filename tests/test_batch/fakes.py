"""An engine and a tokenizer that answer at once and predictably: for tests of everything around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe.engine.request import CompletionOutput, Logprob, Request, RequestOutput
from moe.engine.stats import EngineStats


class FakeTokenizer:
    """One id per character. A chat reads `role:content` for each message; a system message is refused."""

    def __init__(self, **defaults: Any) -> None:
        self.generation_defaults: Mapping[str, Any] = defaults
        self.chats: list[dict[str, Any]] = []

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> list[int]:
        if messages[0]["role"] == "system":
            raise ValueError("the chat template refused the messages: no system role")
        self.chats.append({"tools": tools, **options})
        return self.encode_prompt("|".join(f"{message['role']}:{message['content']}" for message in messages))


class FakeEngine:
    """Answers each request with its prompt in capitals, after as many steps as max_tokens says (default 1).

    A prompt of more than 1000 ids comes back with an error; one that holds "!" ends with finish_reason "error".
    """

    def __init__(self) -> None:
        self.stats = EngineStats(kv_blocks_total=8)
        self.requests: list[Request] = []
        self.most_running = 0
        self.finished: list[str] = []
        self._left: dict[str, int] = {}
        self._by_id: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self._by_id, "an id was used twice"
        self.requests.append(request)
        self._by_id[request.request_id] = request
        self._left[request.request_id] = request.params.max_tokens or 1
        self.most_running = max(self.most_running, len(self._left))

    def step(self) -> list[RequestOutput]:
        assert self._left, "a step without requests"
        self.stats.steps += 1
        done = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            if self._left[request_id] == 0:
                del self._left[request_id]
                self.finished.append(request_id)
                done.append(self._answer(self._by_id[request_id]))
        return done

    def _answer(self, request: Request) -> RequestOutput:
        prompt_ids = list(request.prompt_token_ids)
        text = "".join(chr(i) for i in prompt_ids).upper()
        error, reason = None, "stop"
        if len(prompt_ids) > 1000:
            error, reason = "the prompt has too many tokens", "error"
        elif "!" in text:
            reason = "error"
        ids = [ord(char) for char in text]
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [{i: Logprob(-0.5, 1, chr(i)), 0: Logprob(-1.5, 2, "\0")} for i in ids]
        outputs = [
            CompletionOutput(index, text, ids, reason, None, logprobs=logprobs) for index in range(request.params.n)
        ]
        self.stats.output_tokens += len(ids) * request.params.n
        rejected = error is not None
        return RequestOutput(request.request_id, request.prompt, prompt_ids, outputs, True, 3, None, error, rejected)
