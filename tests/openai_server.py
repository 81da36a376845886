"""A small server with an OpenAI-style API over any `LM`, on this machine: greedy answers, echoed logprobs, streams."""

from collections.abc import Iterator
from contextlib import contextmanager
import json
import logging
from threading import Lock, Thread
from typing import Any

from flask import Flask, Response, jsonify, request
import torch
from werkzeug.serving import make_server

from qspec.nn.lm import LM
from qspec.records import Tokenizer

NAME = "tiny"


class Model:
    """One sequence at a time, whoever asks. `seen`: the questions, in order."""

    def __init__(self, lm: LM, tokenizer: Tokenizer, eos_ids: set[int], context: int) -> None:
        self.lm, self.tokenizer, self.eos_ids, self.context = lm, tokenizer, eos_ids, context
        self.lock, self.seen = Lock(), list[dict[str, Any]]()

    def ids(self, asked: dict[str, Any]) -> list[int]:
        if "messages" in asked:
            return self.tokenizer.chat(asked["messages"])
        prompt = asked["prompt"]
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def answer(self, asked: dict[str, Any]) -> Iterator[int]:
        ids, stops = self.ids(asked), set() if asked.get("ignore_eos") else self.eos_ids
        stops = stops | set(asked.get("stop_token_ids", ()))
        with self.lock, torch.no_grad():
            self.lm.truncate(0)
            for _ in range(asked["max_tokens"]):
                token = int(self.lm.forward(torch.tensor(ids), last=1)[0].argmax())
                yield token
                if token in stops:
                    return
                ids = [token]

    def text(self, asked: dict[str, Any]) -> tuple[str, str]:
        """Up to the first stop string, and why it ends there."""
        tokens = list[int]()
        for token in self.answer(asked):
            tokens.append(token)
            text = self.tokenizer.decode(tokens)
            for stop in asked.get("stop", ()):
                if stop in text:
                    return text.split(stop)[0], "stop"
        ended = tokens[-1] in self.eos_ids | set(asked.get("stop_token_ids", ()))
        return self.tokenizer.decode(tokens), "stop" if ended else "length"

    def logprobs(self, ids: list[int]) -> dict[str, Any]:
        """As vLLM tells them: of every token of the prompt, and of the one behind."""
        with self.lock, torch.no_grad():
            self.lm.truncate(0)
            laws_TV = self.lm.forward(torch.tensor(ids)).log_softmax(-1)
        behind = int(laws_TV[-1].argmax())
        chosen = [float(law_V[token]) for law_V, token in zip(laws_TV, [*ids[1:], behind], strict=True)]
        tops = [{"best": float(law_V.max()), "own": own} for law_V, own in zip(laws_TV, chosen, strict=True)]
        return {"token_logprobs": [None, *chosen], "top_logprobs": [None, *tops]}


@contextmanager
def serve(model: Model) -> Iterator[str]:
    """The server's address, up to and with /v1."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, _app(model), threaded=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _app(model: Model) -> Flask:
    app = Flask(__name__)

    @app.get("/v1/models")
    def models() -> Response:
        return jsonify({"data": [{"id": NAME, "owned_by": "test", "max_model_len": model.context}]})

    @app.post("/v1/completions")
    def completions() -> Response | tuple[Response, int]:
        asked = request.get_json()
        model.seen.append(asked)
        ids = model.ids(asked)
        if len(ids) + asked["max_tokens"] > model.context:
            return jsonify({"error": f"{len(ids)} tokens are too long"}), 400
        if asked.get("echo"):
            return jsonify({"choices": [{"index": 0, "text": "", "logprobs": model.logprobs(ids)}]})
        if asked.get("stream"):
            return Response(_events(model, asked), mimetype="text/event-stream")
        text, reason = model.text(asked)
        return jsonify({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})

    @app.post("/v1/chat/completions")
    def chat() -> Response:
        asked = request.get_json()
        model.seen.append(asked)
        text, reason = model.text(asked)
        message = {"role": "assistant", "content": text}
        return jsonify({"choices": [{"index": 0, "message": message, "finish_reason": reason}]})

    return app


def _events(model: Model, asked: dict[str, Any]) -> Iterator[str]:
    count = 0
    for token in model.answer(asked):
        count += 1
        yield f"data: {json.dumps({'choices': [{'text': f'<{token}>'}]})}\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': count}})}\n\n"
    yield "data: [DONE]\n\n"
